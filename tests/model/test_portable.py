"""A retriever as a folder of sentence-transformers: the real library makes the embeddings that the towers make."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_project import QUESTIONS
from small_world import World
from test_retriever import embedder
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.checkpoint_files import load_models
from realmops.model.packed import PackedBatch
from realmops.model.portable import write_retriever
from realmops.model.retriever import BagOfWords, Retriever, Tower
from realmops.search.embed import document_sequences, embed, embed_documents, query_sequences, text_queries

FP32 = torch.float32
QUERY_LIMIT = 24
ASKED = [question for split in QUESTIONS.values() for question, _ in split]
ASKED += ["", "[MASK] was born in [SEP] Oslo", "Café Ærø \u4e2d\u6587 x" + "y" * 120, "Oslo " * 60]
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"head": "paper", "projection": "orthogonal", "width": 8},
    "paper, nothing behind the mean": {"head": "paper", "pooling": "mean"},
    "release": {"head": "release", "projection": "orthogonal", "width": 8},
    "normalised": {"head": "normalised", "projection": "random", "width": 8, "pooling": "mean"},
    "normalised, no projection": {"head": "normalised", "segments": "one"},
    "cosine": {"head": "cosine", "projection": "pca", "width": 8, "pooling": "mean", "segments": "one"},
}


def moved(tower: Tower, seed: int) -> Tower:
    """Another tower of the same shape, whose biases are not 0 either."""
    other, generator = copy.deepcopy(tower), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other.eval()


def passages(world: World) -> list[tuple[str, str]]:
    snapshot = world.snapshot
    return [(snapshot.title(i), snapshot.text(i)) for i in range(len(snapshot))]


def check_same(folder: Path, retriever: Retriever, world: World) -> SentenceTransformer:
    """The library, which trusts no code, gives the towers' own embeddings."""
    snapshot = world.snapshot
    write_retriever(folder, retriever, snapshot.tokenizer, (QUERY_LIMIT, snapshot.block_wordpieces))
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    queries = text_queries(
        snapshot, ASKED, max(QUERY_LIMIT, snapshot.block_wordpieces) if retriever.shared else QUERY_LIMIT
    )
    query_QE = embed(retriever.query, query_sequences(queries), FP32)
    document_PE = embed_documents(retriever, snapshot, range(len(snapshot)), FP32)
    np.testing.assert_allclose(library.encode_query(ASKED, batch_size=5), query_QE, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(library.encode_document(passages(world)), document_PE, atol=1e-5, rtol=1e-5)
    assert document_PE.std(0).min() > 1e-3  # they are not all the same
    assert library.similarity_fn_name == ("cosine" if retriever.query.head == "cosine" else "dot")
    assert library.get_embedding_dimension() == retriever.query.width
    return library


@pytest.mark.parametrize("shared", [True, False], ids=["one tower", "two towers"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_library_makes_the_same_embeddings(
    form: dict[str, Any], shared: bool, world: World, tmp_path: Path
) -> None:
    query = moved(embedder(**form), 1)
    check_same(tmp_path, Retriever(query, query if shared else moved(query, 2)), world)


@pytest.mark.parametrize("shared", [True, False], ids=["one tower", "two towers"])
def test_the_library_cuts_texts_to_the_encoders_positions(shared: bool, world: World, tmp_path: Path) -> None:
    """Where the run would read more: a longer text has no position."""
    query = moved(embedder(), 1)
    positions, long = query.encoder.positions, ["Oslo is a port. " * 200]
    retriever = Retriever(query, query if shared else moved(query, 2))
    write_retriever(tmp_path, retriever, world.snapshot.tokenizer, (positions + 1, 10_000))
    library = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    towers = (retriever.query, library.encode_query), (retriever.document, library.encode_document)
    for tower, encode in towers:
        cut = query_sequences(text_queries(world.snapshot, long, positions))
        assert [len(tokens) for tokens, _ in cut] == [positions]
        np.testing.assert_allclose(encode(long), embed(tower, cut, FP32), atol=1e-5, rtol=1e-5)
    limits = [json.loads(path.read_text())["max_seq_length"] for path in tmp_path.rglob("sentence_bert_config.json")]
    assert limits == [positions] * (1 if shared else 2)


def test_transformers_opens_the_encoders_of_a_run(trained: Path) -> None:
    """With the same numbers, and a tokenizer that gives the same wordpieces."""
    snapshot, models = Snapshot.open(trained / "root/data/snapshot/corpus"), trained / "root/models/pretrain"
    retriever, reader = (model.eval() for model in load_models(models, snapshot.vocabulary_hash))
    title, text = snapshot.title(3), snapshot.text(3)
    tokens, segments = document_sequences(snapshot, [3])[0]
    for name in ("query_encoder", "reader_encoder"):
        tokenizer = AutoTokenizer.from_pretrained(models / name)
        encoded = tokenizer(title, text, return_tensors="pt")
        assert encoded["input_ids"][0].tolist() == tokens.tolist()
        with torch.no_grad():
            hidden_TD = AutoModel.from_pretrained(models / name)(**encoded).last_hidden_state[0]
            logits_TV = AutoModelForMaskedLM.from_pretrained(models / "reader_encoder")(**encoded).logits[0]
            batch = PackedBatch([tokens], [segments])
            ours_TD = (reader.encoder if name == "reader_encoder" else retriever.query.encoder)(batch)
            scores_TV = reader.masked_words(reader.encoder(batch), reader.encoder.word_vectors)
        torch.testing.assert_close(hidden_TD, ours_TD, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits_TV, scores_TV, rtol=0, atol=1e-4)


def test_a_bag_is_a_table_of_the_library(world: World, tmp_path: Path) -> None:
    bag = BagOfWords(len(world.snapshot.vocabulary), 8, 0.05)
    bag.counts_V[world.special.ids] = 0
    bag.counts_V[20:30] = 0.5
    check_same(tmp_path, Retriever(bag, bag), world)
