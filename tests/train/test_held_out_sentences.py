"""The best checkpoint of pre-training by held-out sentences, also after a kill."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_project
import torch
from small_world import Killed, World, embed_documents, section, tiny_models

from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.model.retriever import FusionWeights
from realmops.search.exact import ExactIndex
from realmops.stages import ict as stages_ict
from realmops.train import held_out_sentences as module
from realmops.train.held_out_sentences import BestCheckpoint, held_out_rows
from realmops.train.index_source import Index
from realmops.train.masked_sentences import Example, Examples
from realmops.train.realm import Realm

# ---- the best checkpoint

Offer = Callable[[int, Mapping[str, float]], None]


def figures(hit: float, log_p: float) -> dict[str, float]:
    return {"hit_at_5": hit, "held_out_log_p": log_p, "recall_at_5": 0.25}


@pytest.fixture
def offered(world: World, tmp_path: Path) -> tuple[BestCheckpoint, Offer]:
    """A best checkpoint, and a function that offers it models of a step, whose weights all equal the step."""
    best = BestCheckpoint(tmp_path / "best", world.text)

    def offer(step: int, metrics: Mapping[str, float]) -> None:
        retriever, reader = tiny_models(world, copying={"copies": True, "apart": True})
        retriever.mixture = FusionWeights(1.0, float(step))
        with torch.no_grad():
            for parameter in (*retriever.parameters(), *reader.parameters()):
                parameter.fill_(step)
        best.offer(step, metrics, retriever, reader)

    return best, offer


def test_the_best_is_the_likeliest_whose_hits_are_those_of_the_start(offered: tuple[BestCheckpoint, Offer]) -> None:
    best, offer = offered
    for step, metrics, expected in (
        (0, figures(0.5, -3.0), 0),
        (4, figures(0.4, -1.0), 0),
        (8, figures(0.5, -3.0), 0),
        (12, figures(0.5, -2.5), 12),
        (14, figures(0.8, -2.6), 12),
        (16, figures(0.6, -2.0), 16),
        (20, figures(0.6, -2.0), 16),
        (24, figures(0.45, -1.0), 16),
        (28, figures(0.9, float("nan")), 16),
    ):
        offer(step, metrics)
        assert [path.name for path in best.folder.iterdir()] == [f"step-{expected:08d}"]
    assert (best.step, best.figures) == (16, {**figures(0.6, -2.0), "start_hit_at_5": 0.5})
    retriever, reader = best.models()
    assert (retriever.mixture, reader.apart) == (FusionWeights(1.0, 16.0), True)
    assert all((p == 16).all() for model in (retriever, reader) for p in model.parameters())
    assert re.search(r"step 16 .*0\.600 \(last 0\.250\).*-2\.000 \(last -1\.500\)", best.describe(figures(0.25, -1.5)))


@pytest.mark.parametrize("log_p", [float("nan"), -float("inf")])
def test_initial_models_whose_likelihood_is_not_finite_are_refused(
    offered: tuple[BestCheckpoint, Offer], log_p: float
) -> None:
    best, offer = offered
    with pytest.raises(ValueError, match=r"held_out_log_p is (nan|-inf) with the models of step 0.*train ict again"):
        offer(0, figures(0.5, log_p))
    assert not list(best.folder.glob("*"))


def test_a_kill_between_saving_and_deleting_keeps_the_new_checkpoint(
    offered: tuple[BestCheckpoint, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, offer = offered
    offer(0, figures(0.5, -3.0))
    usual = module.shutil.rmtree

    def die(folder: Path | str, **options: Any) -> None:
        if Path(folder).name.startswith("step-"):
            raise Killed
        usual(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", die)
        with pytest.raises(Killed):
            offer(4, figures(0.6, -2.0))
    assert len(list(best.folder.iterdir())) == 2
    again = BestCheckpoint(best.folder, best.text)
    assert (again.step, again.figures) == (4, {**figures(0.6, -2.0), "start_hit_at_5": 0.5})
    offer(4, figures(0.6, -2.0))
    assert again.step == 4
    offer(8, figures(0.7, -1.0))
    assert [path.name for path in best.folder.iterdir()] == ["step-00000008"]


def test_without_held_out_sentences_the_last_checkpoint_is_the_best(offered: tuple[BestCheckpoint, Offer]) -> None:
    best, offer = offered
    for step in (0, 4, 8):
        offer(step, {"recall_at_5": 1.0 - step / 10})
        assert best.step == step


# ---- held-out sentences


def test_no_span_of_a_held_out_sentence_is_drawn(world: World) -> None:
    """Rows 0 and 6, and those of the same sentences; passages stay uniform among those with a span left."""
    options = section("pretrain", masking="salient", reader_wordpieces=60)
    examples = Examples(world.snapshot, world.spans, options)
    rows = examples.rows[:]
    held = np.array([0, 6])
    gone = [n for n, row in enumerate(rows.tolist()) if any(row[:2] == rows[h, :2].tolist() for h in held)]
    examples.hold_out(held)
    assert sorted(examples.drawn.tolist()) == [n for n in range(len(rows)) if n not in gone]
    examples.hold_out(np.arange(len(rows)))
    assert len(examples.drawn) == len(rows), "not all can be held out"
    examples.hold_out(np.array([len(rows) - 1]))  # the only sentence of passage 11
    rng = np.random.default_rng(0)
    counts = np.bincount([examples.draw(rng).passage for _ in range(4400)], minlength=12)
    assert counts.tolist() == pytest.approx([400] * 11 + [0], abs=80)


def test_trivial_passages_are_excluded_from_the_evaluation(world: World) -> None:
    """The last span of passage 2 is in a sentence that passage 3 has, too; training may use both."""
    retriever, reader = tiny_models(world)
    limits = {"candidates": 13, "reader_wordpieces": 60}
    options = section("pretrain", **limits, exclude_trivial=False)
    realm = Realm(retriever, reader, world.snapshot, options, torch.float32)
    embedding_PE = embed_documents(retriever, world.snapshot, range(len(world.snapshot)), torch.float32)
    last = int(world.spans.offsets[3]) - 1
    example = Examples(world.snapshot, world.spans, options).example(last, np.random.default_rng(0))
    [ids] = module.retrieve_candidates(realm, [example], Index(0, ExactIndex(embedding_PE), retriever, 0.0, True))
    assert sorted(ids) == [0, 1, *range(4, 12)]


PIECES = ["kim", "art", "##s", "##y", "p", "##art"]


@pytest.mark.parametrize(
    ("passage", "original", "masked", "hit"),
    [
        ("kim art kim", "kim art", [1], True),
        ("kim art", "kim art", [1], True),
        ("kim art ##s", "kim art", [1], False),
        ("art ##s kim art", "kim art", [1], True),
        ("p ##art ##y", "kim art", [1], False),
        ("art ##s ##y", "kim art ##s", [1, 2], False),
        ("kim art ##y", "kim art ##s", [1], True),
    ],
    ids=["inside", "at the end", "longer", "both", "end of another", "longer of two pieces", "masked in part"],
)
def test_only_whole_words_are_hits(
    passage: str, original: str, masked: list[int], hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = (np.array([PIECES.index(piece) for piece in text.split()]) for text in (passage, original))
    continues = np.array([piece.startswith("##") for piece in PIECES])
    following = x[masked[-1] + 1 : masked[-1] + 2]
    example = Example(0, x, x, np.array(masked), x[masked], "", cut=bool(continues[following].any()))
    snapshot = SimpleNamespace(body=lambda passage: body, continues=lambda passage: continues[body])
    realm: Any = SimpleNamespace(snapshot=snapshot)
    monkeypatch.setattr(module, "retrieve_candidates", lambda *_: [[0]])
    monkeypatch.setattr(module, "_guesses", lambda *_: [{"masked_log_p": 0.0}])
    assert module.measure(realm, [example], None)["hit_at_5"] == hit  # type: ignore[arg-type]


@pytest.mark.parametrize(("spans", "held"), [(0, 0), (5, 1), (95, 9), (4000, 400), (50000, 400)])
def test_ict_leaves_out_all_that_pretraining_holds_out(spans: int, held: int) -> None:
    """A tenth and 1,000 at most."""
    rows, left_out = held_out_rows(spans, 3, 400), held_out_rows(spans, 3)
    assert len(rows) == held
    assert rows == left_out[:held]
    assert len(held_out_rows(50000, 3, 2000)) == len(held_out_rows(50000, 3)) == 1000


# ---- the stage

OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.1},
    "retriever": {"hybrid": True},
    "reader": {"copies": True, "apart": True},
    "pretrain": {"masking": "recurring", "crop_weight": 0.5, "steps": 8, "refresh_every": 2, "lag": 1},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project up to ict."""
    folder = tmp_path_factory.mktemp("best")
    small_project.write_project(folder, **OPTIONS)
    for name in ("snapshot", "tag", "ict"):
        small_project.stage(name, small_project.toy_values(**OPTIONS), folder, folder / "root")
    return folder


def run(project: Path, report: small_project.Quiet | None = None, **changes: Any) -> dict[str, Any]:
    values = small_project.toy_values(**{**OPTIONS, "pretrain": {**OPTIONS["pretrain"], **changes}})
    return small_project.stage("pretrain", values, project, project / "root", report)


def files(project: Path) -> dict[str, bytes]:
    return small_project.model_files(project / "root/models/pretrain")


def test_a_killed_pretraining_keeps_its_best_checkpoint_and_saves_the_same_bytes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelihood is patched to be best at step 4; killed after that, and at the very end."""
    killed_at, measured, drawn = [-1], list[int](), list[Example]()
    usual_offer, usual_draw = BestCheckpoint.offer, Examples.draw

    def offer(self: BestCheckpoint, step: int, metrics: dict[str, float], *models: Any) -> None:
        measured.append(step)
        if step == killed_at[0]:
            raise Killed
        metrics |= {"hit_at_5": 0.5, "held_out_log_p": -abs(step - 4)}
        usual_offer(self, step, metrics, *models)

    def draw(self: Examples, rng: np.random.Generator) -> Example:
        drawn.append(usual_draw(self, rng))
        return drawn[-1]

    monkeypatch.setattr(BestCheckpoint, "offer", offer)
    monkeypatch.setattr(Examples, "draw", draw)
    assert run(project)["best_step"] == 4
    assert measured == [0, 4, 6, 8], "the weights of step 2 are those of the delay"
    expected, lines = files(project), small_project.journal(project / "root/models/pretrain")
    snapshot, spans = (
        Snapshot.open(project / "root/data/snapshot/corpus"),
        Spans.open(project / "root/data/spans/corpus"),
    )
    rows = Examples(snapshot, spans, section("pretrain", masking="salient")).rows[:]
    held = {
        (int(p), snapshot.body(int(p))[a:b].tobytes()) for p, a, b, *_ in rows[held_out_rows(len(rows), 0)].tolist()
    }
    assert len(held) == 2
    assert not held & {(e.passage, e.original.tobytes()) for e in drawn}
    shutil.rmtree(project / "root/models/pretrain")
    for killed_at[0] in (6, 8):
        with pytest.raises(Killed):
            run(project)
    killed_at[0] = -1
    run(project)
    assert files(project) == expected
    again = small_project.journal(project / "root/models/pretrain")
    assert small_project.without_clock(again) == small_project.without_clock(lines)


def test_ict_does_not_train_on_the_sentences_that_pretraining_holds_out(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(stages_ict, "train_reader", lambda *arguments: held.append(arguments[6]))
    shutil.copytree(project / "root/data", project / "again/data")
    small_project.stage("ict", small_project.toy_values(**OPTIONS), project, project / "again")
    spans = Spans.open(project / "root/data/spans/corpus")
    assert held == [held_out_rows(len(spans.rows), 0)]
