"""Fine-tuning as a stage with words beside embeddings, batches of passages and windows; killed in each of its parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from safetensors.torch import load_file
from tiny import World, section, tiny_models, write_documents

from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.index.embed import document_sequences, embed, query_sequences
from realmops.index.hybrid import fit_mixture
from realmops.index.lexical import Bm25
from realmops.index.mips import Exact
from realmops.model.files import add_spans, load_models
from realmops.model.retriever import HYBRID_START, Mixture
from realmops.stages import finetune as module
from realmops.stages import masked
from realmops.stages.common import embed_corpus, load_index
from realmops.stages.retrievers import fit_reading, fit_to_questions
from realmops.stages.update import of_pipeline
from realmops.tracking import Journal
from realmops.train.finetune import Answer, OpenQa, Span

OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.1},
    "retriever": {"hybrid": True},
    "reader": {"copies": True, "apart": True},
    "pretrain": {"steps": 0, "builder": "external"},
    "finetune": {"retriever_training": "passages", "retriever_batch_size": 2, "reader_training": "windows"},
}
QUESTIONS = [
    Question("born", "Where was Anna Berg born?", ("Oslo",)),
    Question("star", "Who built The Star?", ("Jon Vik",)),
    Question("died", "When did Maria Holm die?", ("1972",)),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    toy.write_project(folder, **OPTIONS)
    for name in ("snapshot", "tag", "ict", "pretrain"):
        toy.stage(name, toy.toy_values(**OPTIONS), folder, folder / "root")
    return folder


def tune(project: Path, report: toy.Quiet | None = None, **changes: Any) -> dict[str, Any]:
    values = toy.toy_values(**{**OPTIONS, "finetune": {**OPTIONS["finetune"], **changes}})
    return toy.stage("finetune", values, project, project / "root", report)


def files(project: Path) -> dict[str, bytes]:
    found = (project / "root/models/finetune").iterdir()
    return {path.name: path.read_bytes() for path in found if path.name == "model.json" or ".safe" in path.name}


class Killed(BaseException):
    """The process ends here."""


def dying(count: int, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which at its call of this number, from 1, ends the process instead."""
    calls = [0]

    def call(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return usual(*given, **named)

    return call


def test_killed_in_each_of_its_parts_it_ends_with_the_same_bytes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of the retriever, the embeddings, six of the reader, with dropout and a checkpoint at every second."""
    report = toy.Quiet()
    metrics = tune(project, report)
    assert (metrics["passages_with_questions"], metrics["questions_with_evidence"]) == (6, 6)
    [said] = [line for line in report.said if line.startswith("finetune: f(x, z) = ")]
    assert said.endswith("fitted on 2 dev questions")
    expected, lines = files(project), toy.journal(project / "root/models/finetune")
    assert expected.keys() == {"index.safetensors", "model.json", "reader.safetensors", "retriever.safetensors"}
    assert ["retriever_loss" in line for line in lines] == [True] * 6 + [False] * 6
    assert ["span_accuracy" in line for line in lines] == [False] * 6 + [True] * 6
    assert json.loads(expected["model.json"])["share_embedders"], "one tower, which made the embeddings"
    embedded: list[int] = []
    usual = module.embed_corpus
    monkeypatch.setattr(module, "embed_corpus", lambda *given: (embedded.append(1), usual(*given))[1])
    shutil.rmtree(project / "root/models/finetune")
    for place, name, count in ((Journal, "log", 4), (module, "save_index", 1), (Journal, "log", 4)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, dying(count, getattr(place, name)))
            with pytest.raises(Killed):
                tune(project)
    assert len(embedded) == 2, "in the life that was killed as they were written, and in the next"
    tune(project)
    assert len(embedded) == 2
    assert files(project) == expected
    assert toy.without_clock(toy.journal(project / "root/models/finetune")) == toy.without_clock(lines)


def test_with_an_index_refreshed_over_the_exchange_a_kill_changes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of the retriever, indexes of the weights of steps 0, 2 and 4; killed in the fourth."""
    changes = {"retriever_refresh_every": 2, "epochs": 1}
    tune(project, **changes)
    expected, lines = files(project), toy.journal(project / "root/models/finetune")
    assert [line["hard_negatives"] for line in lines if "hard_negatives" in line] == []
    assert [line["retriever_hard_negatives"] for line in lines[:6]] == [1.0] * 6
    shutil.rmtree(project / "root/models/finetune")
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "log", dying(4, Journal.log))
        with pytest.raises(Killed):
            tune(project, **changes)
    tune(project, **changes)
    assert files(project) == expected
    tune(project, epochs=1)
    assert files(project)["retriever.safetensors"] != expected["retriever.safetensors"]


def test_a_query_tower_that_goes_on_learning_leaves_the_passages_tower_alone(project: Path) -> None:
    """Passages of an update are embedded by the saved tower: it must be the one that embedded the others."""
    tune(project, reader_training="passages", freeze_words=True, epochs=1)
    folder, root = project / "root/models/finetune", project / "root"
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    retriever, _ = load_models(folder, snapshot.vocabulary_hash)
    assert torch.equal(embed_corpus(retriever, snapshot, torch.float32), load_index(folder, snapshot))
    pairs = zip(retriever.query.parameters(), retriever.document.parameters(), strict=True)
    assert any(not torch.equal(query, document) for query, document in pairs)
    before, after = (load_file(root / f"models/{name}/reader.safetensors") for name in ("pretrain", "finetune"))
    assert torch.equal(before["bert.word.weight"], after["bert.word.weight"]), "frozen"
    assert not torch.equal(before["bert.position.weight"], after["bert.position.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"BM25's first 20 passages: the retriever cannot learn .*finetune\.retriever_training=queries"),
        ({"retriever_training": "queries"}, r"first 20 passages: the reader .*finetune\.reader_training=passages"),
    ],
)
def test_questions_that_nothing_answers_are_refused(
    project: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_documents(tmp_path / "documents.jsonl")
    for split, answer in (("train", "Nobody at all"), ("dev", "Oslo"), ("test", "Oslo")):
        asked = {"id": "1", "question": "Who?", "answers": [answer]}
        toy.write_json_lines(tmp_path / f"questions.{split}.jsonl", [asked])
    (tmp_path / "tagged.conll").write_text(toy.TAGGED)
    values = toy.toy_values(**{**OPTIONS, "finetune": {**OPTIONS["finetune"], **changes}})
    shutil.copytree(project / "root", tmp_path / "root", ignore=shutil.ignore_patterns("finetune"))
    with pytest.raises(ValueError, match=message):
        toy.stage("finetune", values, tmp_path, tmp_path / "root")


def test_masked_sentences_are_explained_with_words(project: Path) -> None:
    """p(z|x) is that of f(x, z) with both parts, for each candidate by hand."""
    root = project / "root"
    sentence = "The poet was born in [MASK] and wrote in 1931."
    found = masked.explain(sentence, root, of_pipeline(root), answer="Oslo")
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    realm, index, _ = masked.pretrained(root, of_pipeline(root))
    mixture, words = realm.retriever.mixture, Bm25.of(snapshot)
    assert mixture.lexical > 0
    query = sentence.replace("[MASK]", " ")
    best = float(words.search([query], 1)[0][0, 0])
    example = masked._example(sentence, "Oslo", realm)
    names = [snapshot.title(p) for p in range(len(snapshot))]
    ids = [names.index(c.title) for c in found.candidates[:-1]]
    with torch.no_grad():
        embedded = realm.embed([example], [ids])
    f = []
    for z in [*ids, -1]:
        dense = float(realm.retriever.scale * embedded.query_BE[0] @ embedded.document_UE[embedded.place[z]])
        bm25 = float(words.score_of(query, np.array([z]))[0]) / best
        f.append(mixture.dense * dense + mixture.lexical * bm25)
    assert [c.p_z for c in found.candidates] == pytest.approx(torch.tensor(f).double().softmax(0).tolist(), rel=1e-4)
    assert index.passages.embedding_PE.shape[0] == 12


# ---- the weights of questions


def hybrid(world: World, mixture: Mixture = HYBRID_START, **changes: Any) -> OpenQa:
    retriever, reader = tiny_models(world)
    add_spans(reader, 8, seed=0)
    retriever.mixture = mixture
    sequences = document_sequences(world.snapshot, range(12))
    passages = Exact(embed(retriever.document, sequences, torch.float32))
    lengths = {"query_wordpieces": 24, "reader_wordpieces": 60, "answer_wordpieces": 4}
    options = section("finetune", **{"reader_candidates": 3, "retriever_candidates": 12, **lengths, **changes})
    words = Bm25.of(world.snapshot)
    return OpenQa(retriever, reader, world.snapshot, passages, options, torch.float32, None, words)


def test_relevance_is_f_of_both_with_a_gradient_into_the_query_tower(world: World) -> None:
    """Against every passage by hand; where the reader looks at three, the best three of all."""
    model = hybrid(world, Mixture(0.5, 3.0))
    asked = [q.question for q in QUESTIONS]
    relevance_BK, id_BK = model.relevance(asked, 3)
    query_BE = embed(model.retriever.query, query_sequences(model.queries(asked)), torch.float32)
    assert model.words is not None
    for b, question in enumerate(asked):
        bm25_P = model.words.score_of(question, np.arange(12))
        dense_P = model.retriever.scale * (model.passages.embedding_PE @ query_BE[b]).numpy()
        f_P = 0.5 * dense_P + 3.0 * bm25_P / bm25_P.max()
        assert id_BK[b].tolist() == np.argsort(-f_P, kind="stable")[:3].tolist()
        assert relevance_BK[b].tolist() == pytest.approx(np.sort(f_P)[::-1][:3].tolist(), rel=1e-4)
    loss, _ = model.loss(QUESTIONS)
    loss.backward()
    weight = model.retriever.query.projection.weight
    assert weight.grad is not None
    assert weight.grad.abs().max() > 0


def test_weights_are_fitted_to_the_passages_that_hold_an_answer(world: World) -> None:
    """Those of ``fit_mixture`` over all twelve passages, with another question that nothing answers."""
    model = hybrid(world)
    model.retriever.mixture = Mixture(1.0, 8.0, 0.5)
    asked = [*QUESTIONS, Question("never", "Who is she?", ("Nobody",))]
    found = fit_to_questions(model, asked)
    parts = model.find([q.question for q in asked], 12, 12)
    ranked = zip(asked, parts.id_QK.tolist(), strict=True)
    correct = torch.tensor([[q.answers[0] in world.snapshot.text(p) for p in row] for q, row in ranked])
    expected = fit_mixture(parts.dense_QK, parts.words_QK, parts.id_QK >= 0, correct)
    assert expected is not None
    assert (found.dense, found.lexical, found.reading) == (expected.dense, expected.lexical, 0.5)
    assert fit_to_questions(model, asked[-1:]) == Mixture(1.0, 8.0, 0.5), "nothing to fit to: as before"


def read(best: dict[int, tuple[str, float]], gold: tuple[int, str, float] | None = None) -> Answer:
    """An answer from the best span of each passage, by its text and score."""
    spans = [Span(text, passage, (0, len(text)), score) for passage, (text, score) in best.items()]
    right = None if gold is None else Span(gold[1], gold[0], (0, 1), gold[2])
    return Answer(max(spans, key=lambda span: span.score), list(spans), right, list(best), [], list(best))


def test_the_weight_of_reading_by_hand() -> None:
    """f(x, z) is 4 and 0. At weight 1 scores are 5 and 3, that is 1 and 3 of the reader alone, who is right here.

    Below a weight of 0.5 the second passage wins; of 0.25 and 0 the first is nearer to the present one.
    """
    questions = [Question("q", "Q?", ("right",)), Question("r", "R?", ("same",))]
    answers = [
        read({7: ("wrong", 5.0), 8: ("right", 3.0)}, (8, "right", 3.0)),
        read({7: ("same", 9.0), 8: ("other", 1.0)}, (7, "same", 9.0)),
    ]
    relevance = {"Q?": [4.0, 0.0], "R?": [4.0, 0.0]}
    model: Any = SimpleNamespace(
        retriever=SimpleNamespace(mixture=Mixture(1.0, 1.0, 1.0)),
        options=SimpleNamespace(reader_candidates=2),
        evidence=lambda asked, k: (torch.tensor([relevance[asked[0].question][:k]]), None),
    )
    weight, chosen = fit_reading(model, questions, answers)
    assert weight == 0.25
    assert [answer.text for answer in chosen] == ["right", "same"]
    assert [[span.score for span in answer.best_of_passage] for answer in chosen] == [[2.0, 3.0], [6.0, 1.0]]
    assert [answer.best_gold.score for answer in chosen] == [3.0, 6.0]
    assert chosen[0].best == chosen[0].best_of_passage[1]
    already = fit_reading(model, questions[1:], answers[1:])
    assert already == (1.0, answers[1:]), "of equal weights the present one"
