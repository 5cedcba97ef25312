"""Published sentence encoders equal the library sentence-transformers: prompts, pooling, dense layers, width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from small_encoders import edit_json, write_encoder
from small_project import QUESTIONS, SHORT, stage, toy_values, write_project
from small_world import embed_documents

from realmops.corpus.snapshot_reader import Snapshot
from realmops.hub import encoder_files
from realmops.model.build import build_models
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat, load_retriever, save_retriever
from realmops.model.sequences import SpecialTokens
from realmops.questions.question_sets import Question
from realmops.search.embed import document_sequences, embed, query_sequences, text_queries
from realmops.stages.common import question_queries

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
FP32 = torch.float32
E5 = {"query": "Query: ", "passage": "Passage: "}
CASES: dict[str, tuple[str, dict[str, str], list[tuple[int, torch.nn.Module]], dict[str, Any]]] = {
    "bert": ("mean", E5, [], {}),
    "xlm-roberta": ("mean", E5, [(24, torch.nn.Tanh())], {}),
    "roberta": ("cls", E5, [(24, torch.nn.GELU()), (16, torch.nn.Identity())], {}),
    "modernbert": ("lasttoken", {"query": "Find: "}, [], {"projection": "first", "embedding_width": 12}),
    "qwen3": ("lasttoken", {}, [], {}),
    "mpnet": ("mean", {}, [], {"projection": "first", "embedding_width": 8}),
}


def publish(folder: Path, family: str, pooling: str, prompts: dict[str, str], layers: list[Any]) -> SentenceTransformer:
    """A sentence encoder as the library writes it."""
    write_encoder(folder, family, head=False)
    torch.manual_seed(3)
    width, modules = 32, [Transformer(str(folder), max_seq_length=64), Pooling(32, pooling)]
    for outputs, activation in layers:
        modules.append(Dense(width, outputs, activation_function=activation))
        width = outputs
    library = SentenceTransformer(modules=[*modules, Normalize()], device="cpu", prompts=prompts)
    library.save(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu")


def build(folder: Path, project: Path, **changes: Any) -> tuple[Retriever, Snapshot]:
    write_project(project)
    options = {"init": str(folder), "projection": "identity", "embedding_width": 0, "head": "cosine", **changes}
    values = toy_values(**SHORT, retriever=options)
    stage("snapshot", values, project, project)
    snapshot = Snapshot.open(project / "data/snapshot/corpus")
    models = build_models(values.bert, values.retriever, values.reader, snapshot.tokenizer.get_vocab_size(), 0)
    return models[0].eval(), snapshot


@pytest.mark.parametrize("family", CASES)
def test_embeddings_equal_those_of_the_library(family: str, tmp_path: Path) -> None:
    """Of the published folder, and of the one that is saved from it."""
    pooling, prompts, layers, changes = CASES[family]
    library = publish(tmp_path / "encoder", family, pooling, prompts, layers)
    library.truncate_dim = changes.get("embedding_width")
    retriever, snapshot = build(tmp_path / "encoder", tmp_path, **changes)
    special, tokens = SpecialTokens.of(snapshot.tokenizer), snapshot.tokenizer
    decoded = [tokens.decode(list(ids)).replace(" ", "").lower() for ids in (special.query, special.document)]
    assert decoded == [prompts.get(name, "").strip().lower() for name in ("query", "passage")]
    queries = query_sequences(question_queries(snapshot, [Question("", text, ()) for text in ASKED], 64))
    query_QE = embed(retriever.query, queries, FP32)
    peer_QE = library.encode_query(ASKED, normalize_embeddings=True)
    assert (peer_QE @ peer_QE.T).min() < 0.95, "the texts differ"
    np.testing.assert_allclose(query_QE, peer_QE, atol=1e-5)
    texts = [snapshot.text(i) for i in range(len(snapshot))]
    alone_PE = embed(retriever.document, query_sequences(text_queries(snapshot, texts, 64, documents=True)), FP32)
    peer_PE = library.encode(texts, prompt=prompts.get("passage", ""), normalize_embeddings=True)
    np.testing.assert_allclose(alone_PE, peer_PE, atol=1e-5)

    save_retriever(tmp_path / "retriever", retriever, TextFormat(tokens, "", 64))
    assert torch.equal(embed(load_retriever(tmp_path, "").eval().query, queries, FP32), query_QE)
    saved = SentenceTransformer(str(tmp_path / "retriever"), device="cpu", local_files_only=True)
    np.testing.assert_allclose(saved.encode_query(ASKED), query_QE, atol=1e-5)
    pairs = [(snapshot.title(i), text) for i, text in enumerate(texts)]
    document_PE = embed_documents(retriever, snapshot, range(len(snapshot)), FP32)
    np.testing.assert_allclose(saved.encode_document(pairs), document_PE, atol=1e-5)


def test_passages_leave_room_for_the_prompt_of_documents(tmp_path: Path) -> None:
    publish(tmp_path / "encoder", "bert", "mean", {"document": "one two three four: "}, [])
    _, snapshot = build(tmp_path / "encoder", tmp_path)
    special = SpecialTokens.of(snapshot.tokenizer)
    assert len(special.document) > 4
    assert special.query == ()
    for i, (tokens, segments) in enumerate(document_sequences(snapshot, range(len(snapshot)))):
        title, body = snapshot.title_tokens(i).tolist(), snapshot.body(i).tolist()
        prefix = [special.cls, *special.document, *title, special.sep]
        assert tokens.tolist() == [*prefix, *body, special.sep], "nothing is cut"
        assert segments.tolist() == [0] * len(prefix) + [1] * (len(body) + 1)


def test_a_stage_depends_on_prompts_and_layers_if_there_are_any(tmp_path: Path) -> None:
    publish(tmp_path / "plain", "bert", "mean", {}, [])
    files = encoder_files(str(tmp_path / "plain")).keys()
    assert not {"config_sentence_transformers.json", "special_tokens_map.json"} & files
    publish(tmp_path / "more", "bert", "mean", E5, [(8, torch.nn.Tanh())])
    files = encoder_files(str(tmp_path / "more")).keys()
    assert {"config_sentence_transformers.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= files


def test_invalid_modules_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    publish(folder, "bert", "mean", E5, [(8, torch.nn.Tanh())])
    with pytest.raises(ValueError, match=r"projection is first, and retriever.embedding_width is 16: .* 8 numbers"):
        build(folder, tmp_path, projection="first", embedding_width=16)
    edit_json(folder / "2_Dense/config.json", activation_function="mine.Bad")
    with pytest.raises(ValueError, match=r"2_Dense: activation_function is 'mine.Bad'; allowed: torch.nn"):
        build(folder, tmp_path)
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace("2_Dense", "../2_Dense"))
    with pytest.raises(ValueError, match=r"modules.json: '../2_Dense' is not the folder of a layer"):
        build(folder, tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": ["query: "]}))
    modules.unlink()
    with pytest.raises(ValueError, match=r"prompts is \['query: '\]; expected a mapping"):
        build(folder, tmp_path)
