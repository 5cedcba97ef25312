"""A sentence encoder starts with its own vectors and ranking: held against the library sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_project import QUESTIONS, SHORT, stage, toy_values, write_project
from small_world import DOCUMENTS
from transformers import BertConfig, BertModel, BertTokenizerFast

from realmops.config import parse_section
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS, vocabulary_bytes
from realmops.model.build import build_models
from realmops.questions.question_sets import Question
from realmops.search.embed import document_sequences, embed, query_sequences
from realmops.stages.common import question_queries

POOLINGS: dict[str, dict[str, Any]] = {
    "mean": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False},
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False},
}
ASKED = [question for split in QUESTIONS.values() for question, _ in split]


def write_sentence_encoder(folder: Path, pooling: str) -> Path:
    """A BERT with random weights, so large that texts differ, in the form in which such encoders are published."""
    folder.mkdir()
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    words = sorted({word.strip(".").lower() for title, text, _ in DOCUMENTS for word in f"{title} {text}".split()})
    pieces = [*SPECIAL_TOKENS, *words, ".", "?", *(w for w in letters if w not in words), *(f"##{w}" for w in letters)]
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(pieces))
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(pieces))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (name, path) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **POOLINGS[pooling]}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))
    return folder


def ranking(query_QE: np.ndarray, document_PE: np.ndarray) -> list[list[int]]:
    return np.argsort(-(query_QE @ document_PE.T), axis=1, kind="stable").tolist()


@pytest.mark.parametrize("pooling", sorted(POOLINGS))
def test_vectors_and_ranking_are_those_of_sentence_transformers(tmp_path: Path, pooling: str) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_sentence_encoder(tmp_path / "encoder", pooling)
    write_project(tmp_path)
    changes = {"init": str(folder), "projection": "identity", "embedding_width": 0, "head": "cosine"}
    values = toy_values(**SHORT, retriever=changes)
    stage("snapshot", values, tmp_path, tmp_path)
    snapshot = Snapshot.open(tmp_path / "data/snapshot/corpus")
    bert, options, reading = (parse_section(name, values[name]) for name in ("bert", "retriever", "reader"))
    retriever, _ = build_models(bert, options, reading, snapshot.tokenizer.get_vocab_size(), 0)
    questions = [Question("", text, ()) for text in ASKED]
    document_PE = embed(retriever.document, document_sequences(snapshot, range(len(snapshot))), torch.float32).numpy()
    queries = query_sequences(question_queries(snapshot, questions, 64))
    query_QE = embed(retriever.query, queries, torch.float32).numpy()

    peer = SentenceTransformer(str(folder), device="cpu")
    texts = [f"{snapshot.title(i)} [SEP] {snapshot.text(i)}" for i in range(len(snapshot))]
    their_document_PE = np.asarray(peer.encode(texts, show_progress_bar=False))
    their_query_QE = np.asarray(peer.encode(ASKED, show_progress_bar=False))
    spread = their_document_PE @ their_document_PE.T
    assert spread.min() < 0.9, "the texts differ, or nothing is shown"
    assert (document_PE * their_document_PE).sum(1).min() > 0.9999
    assert (query_QE * their_query_QE).sum(1).min() > 0.9999
    assert ranking(query_QE, document_PE) == ranking(their_query_QE, their_document_PE)
