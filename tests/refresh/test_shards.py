"""Tagging and embedding in shards: one worker and six make the same bytes, and what is committed is used again."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_lab import end_of, forked
from faults import CAMPAIGN
from small_project import Quiet, command, stage, toy_values, wait_for, write_project
from small_world import DOCUMENTS, World, build_world, section, tiny_models

from realmops.artifacts import read_json
from realmops.corpus.phrases import DATE
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.build import build_encoder
from realmops.model.retriever_files import retriever_files
from realmops.refresh import shards
from realmops.refresh.builder import DONE, MISCONFIGURED
from realmops.refresh.builder_process import run_index_builder
from realmops.refresh.child_processes import SupervisedProcess
from realmops.refresh.exchange import Exchange, inspect_exchange, part_name
from realmops.refresh.shards import MODEL, ShardSettings, ShardWorker, compute_in_shards
from realmops.search.embed import Progress
from realmops.search.embeddings import embed_corpus, join_shards, make_shard_embedder
from realmops.stages import STAGES
from realmops.stages.runner import shard_offer_path
from realmops.stages.sharded_work import WORKS
from realmops.train.tagger import Tagger, find_entities, make_span_finder, read_spans, tagger_files

CPU, FP32 = torch.device("cpu"), torch.float32
ROWS = 5  # of a shard: 12 passages are three
Files = Mapping[str, bytes]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", ROWS)
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.01)


def place(folder: Path, said: list[str] | None = None) -> ShardSettings:
    log: Callable[[str], None] = print if said is None else said.append
    return ShardSettings(folder / "shards", folder / "offer", CPU, FP32, 1, log)


def some_tagger(world: World, seed: int = 0) -> Tagger:
    """A tagger that has learned nothing and tags every other word."""
    options = section("bert", width=16, layers=1, heads=2, intermediate=32)
    bert, _ = build_encoder("small", options, world.snapshot.tokenizer.get_vocab_size(), seed)
    tagger = Tagger(bert, ["O", "B-NAME", "I-NAME"])
    with torch.no_grad():
        tagger.output.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(seed))
        tagger.output.bias.zero_()
    return tagger


def models(world: World) -> dict[str, dict[str, bytes]]:
    """By work, the files of a model."""
    retriever = retriever_files(tiny_models(world)[0], world.text)
    return {"embedding": retriever, "tagging": tagger_files(some_tagger(world), section("tag"))}


def counting(begun: list[int]) -> shards.Work:
    """A toy: the files of a shard are its first and its end."""

    def work(snapshot: Snapshot, model: Files, device: torch.device, dtype: torch.dtype) -> shards.MakeShard:
        def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            begun.append(first)
            progress(end - first)
            return {"rows": f"{model['model']!r} {first} {end}".encode()}

        return make

    return work


def rows_of(model: bytes) -> list[dict[str, bytes]]:
    return [{"rows": f"{model!r} {first} {end}".encode()} for first, end in ((0, 5), (5, 10), (10, 12))]


def exchange_in(folder: Path) -> Path:
    [root] = (folder / "shards").iterdir()
    return root


# What is made


def test_the_embeddings_are_those_of_the_whole_corpus(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from realmops.search import embeddings

    monkeypatch.setattr(embeddings, "SHARD_ROWS", ROWS)
    retriever = tiny_models(world)[0]
    parts = compute_in_shards(
        place(tmp_path), "embedding", make_shard_embedder, world.snapshot, models(world)["embedding"]
    )
    found_PE = join_shards(parts, 12, retriever.document.width)
    assert torch.equal(found_PE, embed_corpus(retriever, world.snapshot, FP32))
    with pytest.raises(AssertionError):
        join_shards([], 12, retriever.document.width)


def test_the_spans_are_the_taggers_and_dates_come_first(world: World, tmp_path: Path) -> None:
    tagger, options = some_tagger(world), section("tag")
    files = compute_in_shards(
        place(tmp_path), "tagging", make_span_finder, world.snapshot, tagger_files(tagger, options)
    )
    found = [spans for part in files for spans in read_spans(part)]
    entities = find_entities(tagger, world.snapshot, range(12), FP32)
    assert sum(map(len, entities.values())) > 12
    for passage, spans in enumerate(found):
        dates = [span for span in spans if span[2] == DATE]
        others = [span for span in spans if span[2] != DATE]
        assert spans == dates + others
        assert set(others) <= set(entities[passage])
        assert not any(a[0] < b[1] and b[0] < a[1] for a in dates for b in others)
    text = world.snapshot.text(0)
    assert [text[start:end] for start, end, name in found[0] if name == DATE] == ["1931"]
    without = compute_in_shards(
        place(tmp_path), "tagging", make_span_finder, world.snapshot, tagger_files(None, options)
    )
    assert [spans for part in without for spans in read_spans(part)] == [
        [span for span in spans if span[2] == DATE] for spans in found
    ]


@pytest.mark.parametrize("name", WORKS)
def test_helpers_share_the_shards_and_a_killed_one_loses_that_in_its_hand_alone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Six processes; the first helper that begins a shard dies by SIGKILL, and the stage begins none before."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 1)
    model, log, killed, done = models(world)[name], tmp_path / "log", tmp_path / "killed", tmp_path / "done"
    alone = list(compute_in_shards(place(tmp_path / "alone"), name, WORKS[name], world.snapshot, model))
    stage_process = os.getpid()

    def counted(*given: Any) -> shards.MakeShard:
        make = WORKS[name](*given)

        def begun(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            with open(log, "a") as file:
                file.write(f"{first}\n")
            if os.getpid() == stage_process:
                wait_for(killed.exists, 60)
            elif not killed.exists():
                with suppress(FileExistsError):
                    killed.mkdir()
                    os.kill(os.getpid(), signal.SIGKILL)
            return make(first, end, progress)

        return begun

    def helper() -> int:
        while not done.exists():
            with suppress(FileNotFoundError):
                named = read_json(tmp_path / "offer")
                paths = Path(named["exchange"]), Path(named["snapshot"])
                return run_index_builder(*paths, watch_parent=None, works={name: counted})
            time.sleep(0.001)
        return DONE

    helpers = [forked(helper) for _ in range(5)]
    assert list(compute_in_shards(place(tmp_path), name, counted, world.snapshot, model)) == alone
    done.touch()
    assert sorted(map(end_of, helpers)) == [-signal.SIGKILL, *[DONE] * 4]
    begun = sorted(map(int, log.read_text().split()))
    assert len(begun) == 13
    assert {*begun} == {*range(12)}


# What is used again


def test_committed_shards_are_used_again_and_the_others_are_made(world: World, tmp_path: Path) -> None:
    begun: list[int] = []
    usual = counting(begun)

    def killed_at_the_second(*given: Any) -> shards.MakeShard:
        make = usual(*given)

        def dying(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            files = make(first, end, progress)
            if first == 5:
                raise KeyboardInterrupt
            return files

        return dying

    with pytest.raises(KeyboardInterrupt):
        list(compute_in_shards(place(tmp_path), "toy", killed_at_the_second, world.snapshot, {"model": b"a"}))
    assert not place(tmp_path).offer.exists()
    done: list[int] = []
    again = compute_in_shards(place(tmp_path), "toy", usual, world.snapshot, {"model": b"a"}, done.append)
    assert list(again) == rows_of(b"a")
    assert begun == [0, 5, 5, 10]
    assert sorted(done) == [2, 5, 5], "what was there is progress, too"
    assert list(compute_in_shards(place(tmp_path), "toy", usual, world.snapshot, {"model": b"a"})) == rows_of(b"a")
    assert begun == [0, 5, 5, 10]


def test_another_model_makes_shards_of_its_own(world: World, tmp_path: Path) -> None:
    begun: list[int] = []
    for model in (b"a", b"b", b"a"):
        made = compute_in_shards(place(tmp_path), "toy", counting(begun), world.snapshot, {"model": model})
        assert list(made) == rows_of(model)
    assert begun == [0, 5, 10] * 2
    other = ShardSettings(tmp_path / "shards", tmp_path / "offer", CPU, torch.bfloat16, 1, print)
    list(compute_in_shards(other, "toy", counting(begun), world.snapshot, {"model": b"a"}))
    assert begun == [0, 5, 10] * 3, "numbers of another precision"


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "model"])
def test_damaged_shards_and_models_are_computed_again(world: World, tmp_path: Path, harm: str) -> None:
    """A shard; or the model, which is put there again, and all that it made."""
    begun: list[int] = []
    list(compute_in_shards(place(tmp_path), "toy", counting(begun), world.snapshot, {"model": b"a"}))
    file = exchange_in(tmp_path) / "parts" / part_name(MODEL, 5, 10) / "rows"
    if harm == "model":
        file = exchange_in(tmp_path) / "weights" / MODEL / "model"
    content = file.read_bytes()
    file.unlink()
    if harm != "gone":
        file.write_bytes(content[:-1] if harm == "cut" else bytes([content[0] ^ 1]) + content[1:])
    assert list(compute_in_shards(place(tmp_path), "toy", counting(begun), world.snapshot, {"model": b"a"})) == rows_of(
        b"a"
    )
    assert begun == [0, 5, 10, *([0, 5, 10] if harm == "model" else [5])]


# Who helps


def test_a_shard_that_another_makes_is_left_to_it_and_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a helper on another machine has the second shard, and commits it when the stage has said that it waits."""
    monkeypatch.setattr(shards, "LOG_SECONDS", 0.05)
    begun: list[int] = []
    said: list[str] = []

    def committed(message: str) -> None:
        said.append(message)
        if len(said) == 1:
            helper.parts.publish(part_name(MODEL, 5, 10), rows_of(b"a")[1], {"weights": model.digest})

    list(compute_in_shards(place(tmp_path), "toy", counting(begun), world.snapshot, {"model": b"a"}))
    root = exchange_in(tmp_path)
    shutil.rmtree(root / "parts" / part_name(MODEL, 5, 10))
    begun.clear()
    helper = Exchange.open(root, read_json(root / "run/v-000000/manifest.json")["run"], "builder-elsewhere")
    model = helper.weights.load(MODEL)
    life = root / "claims" / f"{5:010d}" / "000002"
    life.mkdir()
    sign = {"host": "pod-of-another-node", "pid": 1, "beat": 1, "done": False}
    (life / "sign.json").write_text(json.dumps(sign))
    somewhere = ShardSettings(tmp_path / "shards", tmp_path / "offer", CPU, FP32, 1, committed)
    assert list(compute_in_shards(somewhere, "toy", counting(begun), world.snapshot, {"model": b"a"})) == rows_of(b"a")
    assert begun == []
    assert said[0].startswith(f"waiting for 1 shards in {root}: ")


def test_shards_are_offered_while_more_than_one_is_missing(world: World, tmp_path: Path) -> None:
    offered: list[Any] = []

    def looking(snapshot: Snapshot, model: Files, device: torch.device, dtype: torch.dtype) -> shards.MakeShard:
        def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            offered.append(read_json(tmp_path / "offer") if (tmp_path / "offer").is_file() else None)
            return {"rows": b""}

        return make

    list(compute_in_shards(place(tmp_path), "toy", looking, world.snapshot, {"model": b"a"}))
    whole = {"exchange": str(exchange_in(tmp_path)), "snapshot": str(world.snapshot.folder)}
    assert offered == [whole] * 3
    assert not (tmp_path / "offer").exists()
    shutil.rmtree(exchange_in(tmp_path) / "parts" / part_name(MODEL, 0, 5))
    list(compute_in_shards(place(tmp_path), "toy", looking, world.snapshot, {"model": b"a"}))
    assert offered[3:] == [None]


def test_a_helper_refuses_what_is_not_for_it(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(compute_in_shards(place(tmp_path), "toy", counting([]), world.snapshot, {"model": b"a"}))
    root = exchange_in(tmp_path)

    def told(folder: Path, works: Mapping[str, shards.Work]) -> str:
        assert run_index_builder(root, folder, watch_parent=None, works=works) == MISCONFIGURED
        return capfd.readouterr().err

    assert "offers 'toy', which this version of realmops does not support" in told(world.snapshot.folder, WORKS)
    (tmp_path / "other").mkdir()
    other = build_world(tmp_path / "other", DOCUMENTS[:5])
    assert "belongs to another run: corpus_hash is" in told(other.snapshot.folder, {"toy": counting([])})
    shutil.rmtree(root)
    on_gpu = ShardSettings(tmp_path / "shards", tmp_path / "offer", torch.device("cuda"), FP32, 1, print)
    list(compute_in_shards(on_gpu, "toy", counting([]), world.snapshot, {"model": b"a"}))
    root = exchange_in(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU here" in told(world.snapshot.folder, {"toy": counting([])})


def test_a_helper_ends_when_all_is_done_and_when_the_exchange_is_gone(world: World, tmp_path: Path) -> None:
    list(compute_in_shards(place(tmp_path), "toy", counting([]), world.snapshot, {"model": b"a"}))
    root = exchange_in(tmp_path)
    works = {"toy": counting([])}
    assert run_index_builder(root, world.snapshot.folder, watch_parent=None, works=works) == DONE
    shutil.rmtree(root / "finished" / "v-000000")
    for first in (0, 5):
        shutil.rmtree(root / "parts" / part_name(MODEL, first, first + 5))

    def leaving(*given: Any) -> shards.MakeShard:
        def make(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            shutil.rmtree(root)
            return {"rows": b""}

        return make

    assert run_index_builder(root, world.snapshot.folder, watch_parent=None, works={"toy": leaving}) == DONE
    assert not root.exists(), "nothing is left behind"


def test_doctor_counts_shards(world: World, tmp_path: Path) -> None:
    list(compute_in_shards(place(tmp_path), "toy", counting([]), world.snapshot, {"model": b"a"}))
    root = exchange_in(tmp_path)
    shutil.rmtree(root / "parts" / part_name(MODEL, 5, 10))
    found = inspect_exchange(root)
    assert "toy: 2 of 3 shards are committed" in found
    assert not [line for line in found if line.startswith("awaited")]


# Stages


LONG = pytest.mark.skipif(not CAMPAIGN, reason="one of the long parts, which make faults runs")


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", ["tag", *(pytest.param(one, marks=LONG) for one in ("pretrain", "finetune", "evaluate"))]
)
def test_a_builder_that_follows_a_stage_makes_shards_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The stage alone first, then again while it leaves all but the last shard of each work to the builder."""
    steps = {"steps": 1, "builder": "child"} if name == "pretrain" else {"steps": 0}
    options = {"tag": {"method": "tagger"}, "pretrain": steps}
    write_project(tmp_path, **options)
    values, root = toy_values(**options), tmp_path / "root"
    before = list(dict.fromkeys(["snapshot", "tag", "ict", "pretrain", "finetune", name]))
    for one in before[: before.index(name) + 1]:
        stage(one, values, tmp_path, root)
    folder = root / STAGES[name].folder
    alone = tmp_path / "alone"
    shutil.move(folder, alone)
    usual = ShardWorker.make_one
    by_others: list[int] = []

    def lazy(self: ShardWorker) -> bool:
        missing = len(self.missing())  # looked at once: the builder may commit the last one at any time
        if missing != 1:
            return False
        by_others.append(len(self.ranges) - missing)
        return usual(self)

    follower = SupervisedProcess(
        command("index-builder", "--follow", shard_offer_path(root, name)), pause=0.0, log=tmp_path / "said"
    )
    with follower:
        monkeypatch.setattr(ShardWorker, "make_one", lazy)  # here alone: the follower has been forked
        report = Quiet()
        stage(name, values, tmp_path, root, report)
        wait_for(lambda: "names none" in (tmp_path / "said").read_text().partition("helping with")[2], 60)
        follower._process.terminate()
        wait_for(lambda: follower.poll() == 0, 60)
    assert set(by_others) <= {2}, "of three shards, where the stage made one at all"
    names = sorted(path.name for path in alone.iterdir())
    assert names == sorted(path.name for path in folder.iterdir())
    told_by_a_clock = {"metrics.json", "metrics.jsonl", "manifest.json", "report.html", "plots"}
    compared = sorted(set(names) - told_by_a_clock)
    assert compared
    for file in compared:
        paths = [p for p in (folder / file, *(folder / file).rglob("*")) if p.is_file()]
        for path in paths:
            assert path.read_bytes() == (alone / path.relative_to(folder)).read_bytes(), path
    assert "helping with" in (tmp_path / "said").read_text()
    assert os.listdir(root / ".realmops/work") == []
