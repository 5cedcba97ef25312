"""What pre-training hands on: the best models by sentences that it never saw, also after a kill."""

import json
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
from small_world import Killed, World, section, tiny_models

from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.model.retriever import FusionWeights
from realmops.search.embed import embed_documents
from realmops.search.exact import ExactIndex
from realmops.stages import ict as stages_ict
from realmops.train import held_out as module
from realmops.train.examples import Example, Examples
from realmops.train.held_out import BestCheckpoint, held_out_rows
from realmops.train.index_source import Index
from realmops.train.realm import Realm

# ---- the best so far


def figures(hit: float, log_p: float) -> dict[str, float]:
    return {"hit_at_5": hit, "held_out_log_p": log_p, "recall_at_5": 0.25}


@pytest.fixture
def offered(world: World, tmp_path: Path) -> tuple[BestCheckpoint, Callable[..., None]]:
    """The best of a folder, and how models of a step are offered, whose weights are full of its number."""
    best = BestCheckpoint(tmp_path / "best", world.text)

    def offer(step: int, found: Mapping[str, float]) -> None:
        retriever, reader = tiny_models(world, copying={"copies": True, "apart": True})
        retriever.mixture = FusionWeights(1.0, float(step))
        with torch.no_grad():
            for module in (retriever, reader):
                for parameter in module.parameters():
                    parameter.fill_(step)
        best.offer(step, found, retriever, reader)

    return best, offer


def test_the_likeliest_of_those_that_find_no_less_than_the_start(
    offered: tuple[BestCheckpoint, Callable[..., None]],
) -> None:
    best, offer = offered
    for step, found, expected in (
        (0, figures(0.5, -3.0), 0),
        (4, figures(0.4, -1.0), 0),
        (8, figures(0.5, -3.0), 0),
        (12, figures(0.5, -2.5), 12),
        (14, figures(0.8, -2.6), 12),
        (16, figures(0.6, -2.0), 16),
        (20, figures(0.6, -2.0), 16),
        (24, figures(0.45, -1.0), 16),
    ):
        offer(step, found)
        assert best.step == expected
        assert [path.name for path in best.folder.iterdir()] == [f"step-{expected:08d}"]
    assert best.figures == {**figures(0.6, -2.0), "start_hit_at_5": 0.5}
    retriever, reader = best.models()
    assert retriever.mixture == FusionWeights(1.0, 16.0)
    assert all((p == 16).all() for model in (retriever, reader) for p in model.parameters())
    assert reader.apart
    assert re.search(r"step 16 .*0\.600 \(last 0\.250\).*-2\.000 \(last -1\.500\)", best.describe(figures(0.25, -1.5)))


@pytest.mark.parametrize("log_p", [float("nan"), -float("inf")])
def test_a_likelihood_that_is_no_number_is_never_the_best(
    offered: tuple[BestCheckpoint, Callable[..., None]], log_p: float
) -> None:
    best, offer = offered
    with pytest.raises(ValueError, match=r"held_out_log_p is (nan|-inf) with the models of step 0.*train ict again"):
        offer(0, figures(0.5, log_p))
    assert not best.folder.exists() or not list(best.folder.iterdir())
    offer(0, figures(0.5, -3.0))
    offer(4, figures(0.9, log_p))
    assert best.step == 0
    offer(8, figures(0.5, -2.5))
    assert best.step == 8


def test_a_kill_between_the_new_and_the_old_leaves_the_new(
    offered: tuple[BestCheckpoint, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, offer = offered
    offer(0, figures(0.5, -3.0))

    usual = module.shutil.rmtree

    def die(folder: Path | str, **how: Any) -> None:
        if Path(folder).name.startswith("step-"):
            raise Killed
        usual(folder, **how)

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", die)
        with pytest.raises(Killed):
            offer(4, figures(0.6, -2.0))
    assert len(list(best.folder.iterdir())) == 2
    again = BestCheckpoint(best.folder, best.text)
    assert again.step == 4
    assert again.figures == {**figures(0.6, -2.0), "start_hit_at_5": 0.5}
    offer(4, figures(0.6, -2.0))
    assert again.step == 4
    offer(8, figures(0.7, -1.0))
    assert [path.name for path in best.folder.iterdir()] == ["step-00000008"]


def test_where_nothing_is_held_out_the_last_are_the_best(offered: tuple[BestCheckpoint, Callable[..., None]]) -> None:
    best, offer = offered
    for step in (0, 4, 8):
        offer(step, {"recall_at_5": 1.0 - step / 10})
        assert best.step == step
    assert best.figures == {"recall_at_5": pytest.approx(0.2), "start_hit_at_5": 0.0}


# ---- held-out sentences


def test_no_span_of_a_held_out_sentence_is_drawn(world: World) -> None:
    """Rows 0 (passage 0, first sentence) and 6: those of the same sentences go too, other sentences stay."""
    options = section("pretrain", masking="salient", query_wordpieces=40, reader_wordpieces=60)
    examples = Examples(world.snapshot, world.spans, options)
    rows = examples.rows[:]
    held = np.array([0, 6])
    gone = [n for n, row in enumerate(rows.tolist()) if any(row[:2] == rows[h, :2].tolist() for h in held)]
    examples.hold_out(held)
    assert sorted(examples.drawn.tolist()) == [n for n in range(len(rows)) if n not in gone]
    rng = np.random.default_rng(0)
    drawn = [examples.draw(rng) for _ in range(3000)]
    sentences = {(e.passage, e.original.tobytes()) for e in drawn}
    for row in held.tolist():
        example = examples.example(row, rng)
        assert (example.passage, example.original.tobytes()) not in sentences
    assert len({e.passage for e in drawn}) >= 11
    examples.hold_out(np.arange(len(rows)))
    assert len(examples.drawn) == len(rows) - len(gone), "all cannot be held out: what there was is drawn"


def test_a_passage_is_uniform_among_those_with_something_left(world: World) -> None:
    """Passage 11 has one sentence: held out, it is never drawn, and the other eleven as often as each other."""
    options = section("pretrain", masking="salient", query_wordpieces=40, reader_wordpieces=60)
    examples = Examples(world.snapshot, world.spans, options)
    examples.hold_out(np.array([len(examples.rows) - 1]))
    rng = np.random.default_rng(0)
    counts = np.bincount([examples.draw(rng).passage for _ in range(4400)], minlength=12)
    assert counts[11] == 0
    assert counts[:11].tolist() == pytest.approx([400] * 11, abs=80)


def test_trivial_passages_never_count_though_training_may_take_them(world: World) -> None:
    """The last span of passage 2 is in a sentence that passage 3 has, too; all other passages are found."""
    retriever, reader = tiny_models(world)
    limits = {"candidates": 13, "query_wordpieces": 40, "reader_wordpieces": 60}
    options = section("pretrain", **limits, exclude_trivial=False)
    realm = Realm(retriever, reader, world.snapshot, options, torch.float32)
    embedding_PE = embed_documents(retriever, world.snapshot, range(len(world.snapshot)), torch.float32)
    last = int(world.spans.offsets[3]) - 1
    example = Examples(world.snapshot, world.spans, options).example(last, np.random.default_rng(0))
    [found] = module.retrieve_candidates(realm, [example], Index(0, ExactIndex(embedding_PE), retriever, 0.0, True))
    assert sorted(found) == [0, 1, *range(4, 12)]


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
def test_a_word_inside_a_longer_one_is_no_hit(
    passage: str, original: str, masked: list[int], hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = (np.array([PIECES.index(piece) for piece in text.split()]) for text in (passage, original))
    continues = np.array([piece.startswith("##") for piece in PIECES])
    behind = x[masked[-1] + 1 : masked[-1] + 2]
    example = Example(0, x, x, np.array(masked), x[masked], "", cut=bool(continues[behind].any()))
    snapshot = SimpleNamespace(body=lambda passage: body, continues=lambda passage: continues[body])
    realm: Any = SimpleNamespace(snapshot=snapshot)
    monkeypatch.setattr(module, "retrieve_candidates", lambda *given: [[0]])
    monkeypatch.setattr(module, "_guesses", lambda *given: [{"masked_log_p": 0.0}])
    found = module.measure(realm, [example], None)  # type: ignore[arg-type]
    assert found["hit_at_5"] == hit


@pytest.mark.parametrize(("spans", "held"), [(0, 0), (5, 1), (95, 9), (4000, 400), (50000, 400)])
def test_what_ict_leaves_out_holds_all_that_pre_training_holds_out(spans: int, held: int) -> None:
    """A tenth and 1,000 at most; how many of these are wanted is known to pre-training alone."""
    wanted, left_out = held_out_rows(spans, 3, 400), held_out_rows(spans, 3)
    assert len(wanted) == held
    assert wanted.tolist() == left_out[:held].tolist()
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


def test_a_killed_pre_training_keeps_its_best_and_hands_on_the_same_bytes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelihood is made to be best at step 4, of those measured; killed behind that, and at the very end."""
    best_at, dies_at, measured, drawn = 4, [-1], list[int](), list[Example]()
    usual_offer, usual_draw = BestCheckpoint.offer, Examples.draw

    def offer(self: BestCheckpoint, step: int, found: dict[str, float], *models: Any) -> None:
        measured.append(step)
        if step == dies_at[0]:
            raise Killed
        found |= {"hit_at_5": 0.5, "held_out_log_p": -abs(step - best_at)}
        usual_offer(self, step, found, *models)

    def draw(self: Examples, rng: np.random.Generator) -> Example:
        drawn.append(usual_draw(self, rng))
        return drawn[-1]

    monkeypatch.setattr(BestCheckpoint, "offer", offer)
    monkeypatch.setattr(Examples, "draw", draw)
    report = small_project.Quiet()
    metrics = run(project, report)
    assert measured == [0, 4, 6, 8], "the weights of step 2 are those of the delay"
    assert metrics["best_step"] == 4
    assert [line for line in report.said if line.startswith("pretrain: the models of step 4 are better than the last")]
    expected, lines = files(project), small_project.journal(project / "root/models/pretrain")
    assert json.loads(expected["retriever/realmops.json"])["mixture"]["lexical"] == 8.0, "fitted to questions alone"
    assert sum("crop_loss" in line for line in lines) == 6

    snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
    spans = Spans.open(project / "root/data/spans/corpus")
    rows = Examples(snapshot, spans, section("pretrain", masking="salient")).rows[:]
    chosen = np.random.default_rng(seed_for(0, "evaluate", "masked")).permutation(len(rows))[: len(rows) // 10]
    held = {(int(rows[n, 0]), snapshot.body(int(rows[n, 0]))[slice(*rows[n, 1:3])].tobytes()) for n in chosen}
    assert len(held) == 2
    assert len(drawn) > 16
    assert not held & {(e.passage, e.original.tobytes()) for e in drawn}

    small_project.stage("ict", small_project.toy_values(**OPTIONS), project, project / "root")
    work = project / "root/models/pretrain"
    shutil.rmtree(work)
    for dies_at[0] in (6, 8):
        with pytest.raises(Killed):
            run(project)
    dies_at[0] = -1
    run(project)
    assert files(project) == expected
    again = small_project.journal(project / "root/models/pretrain")
    assert small_project.without_clock(again) == small_project.without_clock(lines)


def test_harm_is_not_handed_on(project: Path) -> None:
    """With a rate that ruins everything the start's models come out, bit for bit, and that is said."""
    report = small_project.Quiet()
    metrics = run(project, report, retriever_learning_rate=3.0, reader_learning_rate=3.0)
    assert metrics["best_step"] == 0
    [said] = [line for line in report.said if "better than the last" in line]
    assert said.startswith("pretrain: the initial models are better than the last and are saved: held-out hit@5 ")
    for part in ("retriever", "reader"):
        ours, theirs = (
            small_project.model_tensors(project / "root/models" / name, part) for name in ("pretrain", "ict")
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert metrics["masked_log_p"] > -20, "measured with what is handed on"
    assert metrics["hit_at_5_after"] >= metrics["hit_at_5_before"]


def test_ict_hands_on_which_sentences_it_may_not_learn(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that pre-training holds out: without a warm-up text both read the same sentences."""
    seen: list[Any] = []
    monkeypatch.setattr(stages_ict, "train_reader", lambda *given: seen.append(given[6]))
    shutil.copytree(project / "root/data", project / "again/data")
    small_project.stage("ict", small_project.toy_values(**OPTIONS), project, project / "again")
    spans = Spans.open(project / "root/data/spans/corpus")
    assert seen == [held_out_rows(len(spans.rows), 0).tolist()]
    assert len(seen[0]) == 2
