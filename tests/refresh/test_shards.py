"""Tagging and embedding in shards: any number of processes compute the same bytes, and committed shards are reused."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_lab import end_of, forked
from small_project import wait_for
from small_world import DOCUMENTS, World, build_world, section, tiny_models

from realmops.artifacts import read_json, try_lock
from realmops.corpus.phrases import DATE
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.build import build_encoder
from realmops.model.retriever_files import retriever_files
from realmops.refresh import shards
from realmops.refresh.builder import DONE, MISCONFIGURED
from realmops.refresh.builder_process import run_index_builder
from realmops.refresh.exchange import Exchange, inspect_exchange, part_name
from realmops.refresh.shards import MODEL, ShardSettings, compute_in_shards
from realmops.search import embeddings
from realmops.search.embed import Progress
from realmops.stages.sharded_work import WORKS
from realmops.train.tagger import Tagger, find_entities, make_span_finder, read_spans, tagger_files

CPU, FP32 = torch.device("cpu"), torch.float32
ROWS = 5  # of a shard: 12 passages are three
Files = Mapping[str, bytes]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shards, embeddings):
        monkeypatch.setattr(module, "SHARD_ROWS", ROWS)
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.01)


def settings(folder: Path, log: Callable[[str], None] = print) -> ShardSettings:
    return ShardSettings(folder / "shards", folder / "offer", CPU, FP32, 1, log)


def random_tagger(world: World) -> Tagger:
    """A tagger that has learned nothing and tags every other word."""
    options = section("bert", width=16, layers=1, heads=2)
    bert, _ = build_encoder("small", options, world.snapshot.tokenizer.get_vocab_size(), 0)
    tagger = Tagger(bert, ["O", "B-NAME", "I-NAME"])
    with torch.no_grad():
        tagger.output.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
        tagger.output.bias.zero_()
    return tagger


def toy(computed: list[int], before: Callable[[int], object] = lambda first: None) -> shards.Work:
    """Work whose shards name the model and their rows, recorded by first row."""

    def work(snapshot: Snapshot, model: Files, device: torch.device, dtype: torch.dtype) -> shards.MakeShard:
        def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            before(first)
            computed.append(first)
            progress(end - first)
            return {"rows": f"{model['model']!r} {first} {end}".encode()}

        return make

    return work


def rows_of(model: bytes) -> list[dict[str, bytes]]:
    return [{"rows": f"{model!r} {first} {end}".encode()} for first, end in ((0, 5), (5, 10), (10, 12))]


class Stage:
    """A stage that computes toy shards of the world's snapshot in one folder."""

    def __init__(self, world: World, folder: Path) -> None:
        self.snapshot, self.settings, self.computed = world.snapshot, settings(folder), list[int]()

    def run(self, model: bytes = b"a", before: Any = lambda first: None, progress: Progress = lambda n: None) -> Any:
        work = toy(self.computed, before)
        return list(compute_in_shards(self.settings, "toy", work, self.snapshot, {"model": model}, progress))

    @property
    def root(self) -> Path:
        [root] = self.settings.folder.iterdir()
        return root

    def remove(self, first: int, end: int) -> None:
        shutil.rmtree(self.root / "parts" / part_name(MODEL, first, end))


@pytest.fixture
def finished(world: World, tmp_path: Path) -> Stage:
    """A stage whose shards are all committed."""
    stage = Stage(world, tmp_path)
    assert stage.run() == rows_of(b"a")
    assert stage.computed == [0, 5, 10]
    stage.computed.clear()
    return stage


def test_embeddings_in_shards_equal_those_of_the_whole_corpus(world: World, tmp_path: Path) -> None:
    retriever = tiny_models(world)[0]
    files = retriever_files(retriever, world.text)
    parts = compute_in_shards(settings(tmp_path), "embedding", WORKS["embedding"], world.snapshot, files)
    joined_PE = embeddings.join_shards(parts, 12, retriever.document.width)
    assert torch.equal(joined_PE, embeddings.embed_corpus(retriever, world.snapshot, FP32))


def test_spans_in_shards_are_dates_and_the_entities_of_the_tagger_between_them(world: World, tmp_path: Path) -> None:
    tagger = random_tagger(world)
    files = tagger_files(tagger)
    parts = compute_in_shards(settings(tmp_path), "tagging", make_span_finder, world.snapshot, files)
    entities = find_entities(tagger, world.snapshot, range(12), FP32)
    for passage, spans in enumerate(spans for part in parts for spans in read_spans(part)):
        dates = [span for span in spans if span[2] == DATE]
        others = [span for span in spans if span[2] != DATE]
        assert spans == dates + others
        assert set(others) <= set(entities[passage])
        assert not any(a[0] < b[1] and b[0] < a[1] for a in dates for b in others)


@pytest.mark.parametrize("name", WORKS)
def test_six_processes_compute_the_bytes_of_one_and_a_killed_helper_loses_one_shard(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first helper that begins a shard dies by SIGKILL; the stage begins none before."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 1)
    model = {
        "embedding": lambda: retriever_files(tiny_models(world)[0], world.text),
        "tagging": lambda: tagger_files(random_tagger(world)),
    }[name]()
    log, killed, done = tmp_path / "log", tmp_path / "killed", tmp_path / "done"
    alone = list(compute_in_shards(settings(tmp_path / "alone"), name, WORKS[name], world.snapshot, model))
    stage_process = os.getpid()

    def counted(*arguments: Any) -> shards.MakeShard:
        make = WORKS[name](*arguments)

        def begin(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            with open(log, "a") as file:
                file.write(f"{first}\n")
            if os.getpid() == stage_process:
                wait_for(killed.exists, 60)
            elif not killed.exists():
                with suppress(FileExistsError):
                    killed.mkdir()
                    os.kill(os.getpid(), signal.SIGKILL)
            return make(first, end, progress)

        return begin

    def helper() -> int:
        while not done.exists():
            with suppress(FileNotFoundError):
                offer = read_json(tmp_path / "offer")
                paths = Path(offer["exchange"]), Path(offer["snapshot"])
                return run_index_builder(*paths, watch_parent=None, works={name: counted})
            time.sleep(0.001)
        return DONE

    helpers = [forked(helper) for _ in range(5)]
    assert list(compute_in_shards(settings(tmp_path), name, counted, world.snapshot, model)) == alone
    done.touch()
    assert sorted(map(end_of, helpers)) == [-signal.SIGKILL, *[DONE] * 4]
    begun = sorted(map(int, log.read_text().split()))
    assert len(begun) == 13
    assert {*begun} == {*range(12)}


# Reuse


def test_a_killed_stage_reuses_committed_shards_and_counts_them_as_progress(world: World, tmp_path: Path) -> None:
    stage, done = Stage(world, tmp_path), list[int]()

    def kill(first: int) -> None:
        if first == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.run(before=kill)
    assert not stage.settings.offer.exists()
    assert stage.run(progress=done.append) == rows_of(b"a")
    assert stage.computed == [0, 5, 10]
    assert sorted(done) == [2, 5, 5]


def test_another_model_and_precision_have_other_shards(finished: Stage) -> None:
    assert finished.run(b"b") == rows_of(b"b")
    finished.settings = replace(finished.settings, dtype=torch.bfloat16)
    finished.run()
    assert finished.computed == [0, 5, 10] * 2


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "model"])
def test_damaged_shards_and_all_of_a_damaged_model_are_computed_again(finished: Stage, damage: str) -> None:
    file = finished.root / "parts" / part_name(MODEL, 5, 10) / "rows"
    if damage == "model":
        file = finished.root / "weights" / MODEL / "model"
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    assert finished.run() == rows_of(b"a")
    assert finished.computed == ([0, 5, 10] if damage == "model" else [5])


# Helpers


@pytest.mark.parametrize(("lock", "computed"), [(try_lock, [5, 10]), (lambda file: None, [0, 5, 10])])
def test_processes_whose_locks_are_not_shared_compute_the_same_bytes_twice(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Any, computed: list[int]
) -> None:
    """A helper computes all that it may while the stage computes its first shard."""
    monkeypatch.setattr(shards, "try_lock", lock)
    stage, helped = Stage(world, tmp_path), list[int]()

    def help_with_shards(first: int) -> None:
        if not helped:
            run = read_json(stage.root / "run/v-000000/manifest.json")["run"]
            helper = Exchange.open(stage.root, run, "builder-elsewhere")
            model = helper.weights.load(MODEL)
            worker = shards.ShardWorker(helper, world.snapshot, toy(helped), model, CPU, FP32)
            while worker.make_one():
                pass

    assert stage.run(before=help_with_shards) == rows_of(b"a")
    assert (stage.computed, helped) == ([0], computed)


def test_a_leased_shard_is_awaited_with_a_message(finished: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper has the lease of the second shard, and commits it when the stage has logged that it waits."""
    monkeypatch.setattr(shards, "LOG_SECONDS", 0.05)
    messages: list[str] = []

    def commit(message: str) -> None:
        messages.append(message)
        if len(messages) == 1:
            helper.parts.publish(part_name(MODEL, 5, 10), rows_of(b"a")[1], {"weights": model.digest})

    finished.remove(5, 10)
    run = read_json(finished.root / "run/v-000000/manifest.json")["run"]
    helper = Exchange.open(finished.root, run, "builder-elsewhere")
    model = helper.weights.load(MODEL)
    finished.settings = replace(finished.settings, log=commit)
    assert "toy: 2 of 3 shards are committed" in inspect_exchange(finished.root)
    with open(finished.root / "claims" / f"{5:010d}", "ab") as claim:
        try_lock(claim)
        assert finished.run() == rows_of(b"a")
    assert finished.computed == []
    assert messages[0].startswith(f"waiting for 1 shards in {finished.root}: ")


def test_a_helper_refuses_unknown_work_another_corpus_and_a_missing_device(
    finished: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(snapshot: Snapshot, works: Mapping[str, shards.Work]) -> str:
        assert run_index_builder(finished.root, snapshot.folder, watch_parent=None, works=works) == MISCONFIGURED
        return capfd.readouterr().err

    assert "offers 'toy', which this version of realmops does not support" in refusal(finished.snapshot, WORKS)
    (tmp_path / "other").mkdir()
    other = build_world(tmp_path / "other", DOCUMENTS[:5])
    assert re.search("belongs to another run: .*: corpus_hash is", refusal(other.snapshot, {"toy": toy([])}))
    shutil.rmtree(finished.root)
    finished.settings = replace(finished.settings, device=torch.device("cuda"))
    finished.run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU here" in refusal(finished.snapshot, {"toy": toy([])})


def test_a_helper_ends_when_all_shards_are_committed_and_when_the_exchange_is_removed(finished: Stage) -> None:
    root, folder = finished.root, finished.snapshot.folder
    assert run_index_builder(root, folder, watch_parent=None, works={"toy": toy([])}) == DONE
    shutil.rmtree(root / "finished" / "v-000000")
    finished.remove(0, 5)
    works = {"toy": toy([], before=lambda first: shutil.rmtree(root))}
    assert run_index_builder(root, folder, watch_parent=None, works=works) == DONE
    assert not root.exists(), "nothing is left over"
