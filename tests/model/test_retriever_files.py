"""Files of models: sentence-transformers computes the same embeddings, and our loaders read the same bits back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small_encoders import edit_json
from small_project import QUESTIONS
from small_world import World, embed_documents, tiny_models
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.build import add_span_head
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, model_files, save_models
from realmops.model.retriever import BagOfWords, FusionWeights, Retriever
from realmops.model.retriever_files import (
    TextFormat,
    load_retriever,
    passage_tower_digest,
    retriever_files,
    retriever_from_files,
    save_retriever,
)
from realmops.search.embed import document_sequences, embed, query_sequences, text_queries
from realmops.search.embeddings import indexed_tower, load_index

FP32 = torch.float32
TEXTS = [question for split in QUESTIONS.values() for question, _ in split]
TEXTS += ["", "[MASK] was born in [SEP] Oslo", "Café Ærø \u4e2d\u6587 x" + "y" * 120, "Oslo " * 60]
FORMS: dict[str, dict[str, Any]] = {
    "paper": {"head": "paper"},
    "paper, mean alone": {"head": "paper", "projection": "identity", "embedding_width": 0, "pooling": "mean"},
    "release": {"head": "release"},
    "normalised": {"head": "normalised", "pooling": "mean"},
    "normalised, identity": {"head": "normalised", "projection": "identity", "embedding_width": 16},
    "cosine": {"head": "cosine", "pooling": "mean"},
    "first dimensions": {"head": "cosine", "projection": "first", "embedding_width": 12, "pooling": "last"},
    "bag": {"tower": "bag", "head": "cosine"},
}  # fmt: skip


def form_of(world: World, *, share: bool = True, **form: Any) -> Retriever:
    """A retriever whose biases are not 0 and whose towers differ unless they are shared."""
    retriever, _ = tiny_models(world, **form, share_embedders=share)
    retriever.mixture = FusionWeights(0.7, 3.5, 2.0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in [] if share else retriever.document.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for tower in (retriever.query, retriever.document):
            if isinstance(tower, BagOfWords):
                tower.counts_V[list(world.special.ids)] = 0.0
                tower.word.weight[list(world.special.ids)] = 0.0
    return retriever.eval()


def check_equal(ours: Retriever | Reader, loaded: Retriever | Reader) -> None:
    assert loaded.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    for attribute in ("shared", "vectors", "mixture", "scale", "apart"):
        assert getattr(loaded, attribute, None) == getattr(ours, attribute, None), attribute


@pytest.mark.parametrize("share", [True, False], ids=["one tower", "two towers"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_library_and_our_loader_open_every_form(
    form: dict[str, Any], share: bool, world: World, tmp_path: Path
) -> None:
    """Without code of the folder; loaded files are saved with the same bytes."""
    snapshot, retriever = world.snapshot, form_of(world, share=share, **form)
    save_retriever(tmp_path / "retriever", retriever, world.text)
    library = SentenceTransformer(str(tmp_path / "retriever"), device="cpu", local_files_only=True)
    queries = query_sequences(text_queries(snapshot, TEXTS, snapshot.block_wordpieces))
    if form.get("tower") == "bag":  # the library does not truncate
        queries = query_sequences(text_queries(snapshot, TEXTS, 512))
    query_QE = embed(retriever.query, queries, FP32)
    document_PE = embed_documents(retriever, snapshot, range(len(snapshot)), FP32)
    passages = [(snapshot.title(i), snapshot.text(i)) for i in range(len(snapshot))]
    np.testing.assert_allclose(library.encode_query(TEXTS, batch_size=5), query_QE, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(library.encode_document(passages), document_PE, atol=1e-5, rtol=1e-5)
    assert document_PE.std(0).min() > 1e-3, "passages differ"
    assert library.similarity_fn_name == ("cosine" if retriever.query.head == "cosine" else "dot")
    assert library.get_embedding_dimension() == retriever.query.width
    files = retriever_files(retriever, world.text)
    for loaded in (load_retriever(tmp_path, world.text.vocabulary_hash), retriever_from_files(files)):
        check_equal(retriever, loaded)
        assert loaded.query.description == retriever.query.description
        assert retriever_files(loaded, world.text) == files


def test_several_vectors_are_loaded(world: World) -> None:
    """The library computes one vector of a passage, the mean over its text; ours computes all."""
    retriever = form_of(world, head="cosine", pooling="mean", document_vectors=3)
    loaded = retriever_from_files(retriever_files(retriever, world.text)).eval()
    check_equal(retriever, loaded)
    embedding_PX = embed_documents(loaded, world.snapshot, range(12), FP32)
    assert torch.equal(embedding_PX, embed_documents(retriever, world.snapshot, range(12), FP32))
    assert embedding_PX.shape == (12, 3 * loaded.query.width)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("spans", [True, False])
def test_readers_are_loaded_as_saved(world: World, tmp_path: Path, spans: bool, apart: bool) -> None:
    retriever, reader = tiny_models(world, copying={"copies": apart, "apart": apart, "matches": not apart})
    if spans:
        add_span_head(reader, 12, seed=0)
        reader.spans.norm.eps = 1e-3  # as in published readers
    save_models(tmp_path / "one", retriever, reader, world.text)
    _, loaded = load_models(tmp_path / "one", world.text.vocabulary_hash)
    check_equal(reader, loaded)
    assert not spans or loaded.spans.norm.eps == 1e-3
    save_models(tmp_path / "two", retriever, loaded, world.text)
    first, second = ([path.read_bytes() for path in model_files(tmp_path / name)] for name in ("one", "two"))
    assert first == second


def test_models_of_another_vocabulary_or_version_are_refused(world: World, tmp_path: Path) -> None:
    save_models(tmp_path, *tiny_models(world), world.text)
    with pytest.raises(ValueError, match=r"trained with the vocabulary \w{12}, the snapshot has beef; run the stages"):
        load_models(tmp_path, "beef")
    for name in ("reader", "retriever"):
        path = tmp_path / name / "realmops.json"
        path.write_text("{}")
        with pytest.raises(ValueError, match=rf"{path} is missing .* another version of realmops made it; run 'realm"):
            load_models(tmp_path, world.text.vocabulary_hash)


def test_texts_end_at_the_encoders_last_position(world: World, tmp_path: Path) -> None:
    retriever, long = form_of(world, head="paper", share=False), ["Oslo is a port. " * 200]
    positions = retriever.query.encoder.positions
    save_retriever(tmp_path, retriever, TextFormat(world.snapshot.tokenizer, "", 10_000))
    library = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    for tower, encode in (
        (retriever.query, library.encode_query), (retriever.document, library.encode_document)
    ):  # fmt: skip
        cut = query_sequences(text_queries(world.snapshot, long, positions))
        np.testing.assert_allclose(encode(long), embed(tower, cut, FP32), atol=1e-5, rtol=1e-5)


def test_the_digest_of_the_passage_tower_counts_weights_configuration_and_pooling(world: World, tmp_path: Path) -> None:
    """Not the query tower, nor whether both towers are one."""
    retriever = form_of(world, head="normalised")
    other = Retriever(copy.deepcopy(retriever.query), retriever.document)
    with torch.no_grad():
        other.query.encoder.word_vectors.add_(1.0)
    save_retriever(tmp_path / "one", retriever, world.text)
    save_retriever(tmp_path / "two", other, world.text)
    digest = passage_tower_digest(tmp_path / "one")
    assert passage_tower_digest(tmp_path / "two") == digest
    edit_json(tmp_path / "one/realmops.json", pooling="mean")
    assert passage_tower_digest(tmp_path / "one") != digest
    edit_json(tmp_path / "two/document_0_Transformer/config.json", num_attention_heads=1)
    assert passage_tower_digest(tmp_path / "two") != digest


def test_a_run_has_folders_of_both_libraries(answering: Path) -> None:
    """Of every stage: cosines to the rows of the index are 1, and readers predict masked words in transformers."""
    root = answering / "root"
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    passages = [(snapshot.title(i), snapshot.text(i)) for i in range(len(snapshot))]
    index_PE = load_index(root / "models/finetune", snapshot)
    tokens, segments = document_sequences(snapshot, [3])[0]
    for folder in (root / "models" / stage for stage in ("ict", "pretrain", "finetune")):
        library = SentenceTransformer(str(folder / "retriever"), device="cpu", local_files_only=True)
        assert indexed_tower(root / "models/finetune") == passage_tower_digest(folder / "retriever")
        embedding_PE = library.encode_document(passages, convert_to_tensor=True)
        assert torch.cosine_similarity(embedding_PE, index_PE).min() > 0.9999
        reader = load_models(folder, snapshot.vocabulary_hash)[1].eval()
        encoded = AutoTokenizer.from_pretrained(folder / "reader")(*passages[3], return_tensors="pt")
        assert encoded["input_ids"][0].tolist() == tokens.tolist()
        with torch.no_grad():
            hidden_TD = AutoModel.from_pretrained(folder / "reader")(**encoded).last_hidden_state[0]
            logits_TV = AutoModelForMaskedLM.from_pretrained(folder / "reader")(**encoded).logits[0]
            ours_TD = reader.encoder(PackedBatch([tokens], [segments]))
            assert reader.masked_words is not None
            ours_TV = reader.masked_words(ours_TD, reader.encoder.word_vectors)
        torch.testing.assert_close(hidden_TD, ours_TD, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits_TV, ours_TV, rtol=0, atol=1e-4)
