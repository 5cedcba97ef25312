"""The campaign against faults: failing disks, damaged files, old listings, long runs.

``make test`` runs it cut short, ``make faults`` at full length. Kills are in test_exchange.py (simulated) and, by
SIGKILL, in test_pipeline_local.py.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import (
    IDENTITY,
    ROOT,
    WORK,
    Fault,
    Killed,
    MemoryFiles,
    Plan,
    StaleFiles,
    StillClock,
    builder_on,
    exchange_with_everything,
    life,
    sound,
    undisturbed,
)
from faults import ERRORS, FailingDisk, times

from realmops.artifacts import atomic_folder, read_manifest, write_manifest
from realmops.files import Files
from realmops.refresh.builder import Builder
from realmops.refresh.exchange import Exchange, inspect_exchange
from realmops.refresh.trainer import RefreshPolicy
from realmops.refresh.versions import CorruptVersionError, version_name

pytestmark = pytest.mark.faults
PLAN = Plan(steps=4)


# A disk that fails


def run_on(root: Path) -> bytes:
    """The toy trainer and a builder that works while it waits, in this process, until the run is done."""
    builders: list[Builder] = []

    def build() -> None:
        try:
            if not builders:
                builders.append(builder_on(Files(), StillClock(), root=root))
            builders[0].build_next()
            builders[0].exchange.collect_garbage()
        except (OSError, CorruptVersionError):
            pass

    for _ in range(3):
        clock = StillClock(build)
        try:
            return life(Exchange.open(root, IDENTITY, files=Files(), clock=clock, grace=0.0), PLAN)
        except OSError:
            continue
    raise AssertionError("one error of the disk ended three lives")


def at_every_write(kind: str, step: int = 1) -> Iterator[tuple[int, FailingDisk]]:
    """A disk that fails at its first write, then at a later one, until it has none so late; short writes are all."""
    at = 0
    while True:
        disk = FailingDisk(at, kind, lasting=kind not in ("EIO", "short"))
        yield at, disk
        if not disk.failed or kind == "short":
            return
        at += step


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_disk_at_any_write_of_the_exchange(tmp_path: Path, kind: str) -> None:
    expected = undisturbed(PLAN)
    for at, disk in at_every_write(kind, times(23, 1)):
        root, disk.lasting = tmp_path / str(at), False
        with disk:
            assert run_on(root) == expected, at
        sound(Files(), root)
        shutil.rmtree(root)
    assert at > 200


def test_writes_that_are_done_in_part_change_nothing(tmp_path: Path) -> None:
    with FailingDisk(0, "short"):
        assert run_on(tmp_path / "e") == undisturbed(PLAN)


def states(folder: Path) -> Iterator[tuple[int, dict[str, bytes]]]:
    for step in range(4):
        yield step, {"tensors": bytes([step]) * 5000, "state.json": b"%d" % step}


@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    from realmops.train.checkpoints import FolderCheckpoints

    for at, disk in at_every_write(kind):
        checkpoints, saved = FolderCheckpoints(tmp_path / str(at)), None
        with disk:
            for step, files in states(tmp_path):
                try:
                    checkpoints.save(step, files)
                    saved = files
                except OSError:
                    assert disk.failed
                    found = checkpoints.restore()
                    assert found in (saved, files), at
                    saved = found
        assert checkpoints.restore() == saved
        checkpoints.save(9, {"tensors": b"new"})
        assert checkpoints.restore() == {"tensors": b"new"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_snapshot(tmp_path: Path, kind: str) -> None:
    from small_world import write_documents

    from realmops.corpus.snapshot_writer import write_snapshot
    from realmops.corpus.word_counts import train_vocabulary
    from realmops.readers.sources import list_sources

    corpus = list_sources(write_documents(tmp_path / "documents.jsonl"), "auto")
    pieces = train_vocabulary(corpus, size=150, min_count=1)

    def write(folder: Path) -> dict[str, bytes]:
        with atomic_folder(folder / "s") as stage:
            write_snapshot(corpus, stage, vocabulary=pieces, block_wordpieces=48)
        return read(folder)

    def read(folder: Path) -> dict[str, bytes]:
        read_manifest(folder / "s", "snapshot")
        return {str(p.relative_to(folder / "s")): p.read_bytes() for p in (folder / "s").rglob("*") if p.is_file()}

    (tmp_path / "calm").mkdir()
    expected = write(tmp_path / "calm")
    for at, disk in at_every_write(kind, times(7, 1)):
        folder = tmp_path / str(at)
        folder.mkdir()
        with disk:
            try:
                found = write(folder)
            except OSError:
                assert disk.failed
                left = {path.name for path in folder.iterdir()}
                assert not left or (left == {"s"} and read(folder) == expected), "half a snapshot was left"
                found = None
        assert (found or write(folder)) == expected, at
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_the_index_of_words(world: Any, tmp_path: Path, kind: str) -> None:
    from realmops.search.bm25 import Bm25
    from realmops.search.bm25_writer import write_bm25

    def read(folder: Path) -> dict[str, bytes]:
        Bm25.open(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    expected = read(world.folder / "lexical")
    for at, disk in at_every_write(kind, times(5, 1)):
        final, work = tmp_path / str(at) / "lexical", tmp_path / "work"
        with disk:
            try:
                write_bm25(final, world.snapshot, work=work, earlier=world.snapshot if at % 2 else None)
            except OSError:
                assert disk.failed
                assert not final.exists() or read(final) == expected, "half an index was left"
        write_bm25(final, world.snapshot, work=work)
        assert read(final) == expected, at


# Listings


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed_lag", "as_soon_as_ready"])
def test_a_listing_that_is_old_for_everybody_delays_and_changes_nothing(fixed: bool) -> None:
    """Both sides see a listing for a minute, on clocks that are a day apart; either is killed at any operation."""
    policy = RefreshPolicy(
        "fixed_lag" if fixed else "as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6, poll=5.0
    )
    plan, at, old = Plan(steps=4, policy=policy), -1, 0
    while True:
        volume, fault = MemoryFiles(), Fault(at)
        seen: list[StaleFiles] = []
        there = StillClock()
        there.unix = lambda there=there: there.now - 86400.0  # type: ignore[method-assign]
        builders: list[Builder] = []

        def build() -> None:
            there.now = here.now  # noqa: B023
            try:
                if not builders:  # noqa: B023
                    files = StaleFiles(None, volume.top, there, 60.0)  # noqa: B023
                    seen.append(files)  # noqa: B023
                    exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=files, clock=there, grace=120.0)  # noqa: B023
                    builders.append(Builder(exchange, WORK, on_status=lambda message: None))  # noqa: B023
                builders[0].build_next()  # noqa: B023
                builders[0].exchange.collect_garbage()  # noqa: B023
            except (OSError, CorruptVersionError):
                pass

        here = StillClock(build)
        for around in (fault, None):
            seen.append(StaleFiles(around, volume.top, here, 60.0))
            try:
                exchange = Exchange.open(ROOT, IDENTITY, files=seen[-1], clock=here, grace=120.0)
                params = life(exchange, plan, each_step=lambda step: here.sleep(7.0))  # noqa: B023
                break
            except Killed:
                here.now += 1.0
        assert not fixed or params == undisturbed(plan), at
        sound(volume)
        old += sum(files.old for files in seen)
        if 0 <= fault.count <= at:
            break
        at += times(29, 1)
    assert old > 20


# Damaged files


def damaged(content: bytes, flips: int, rng: random.Random) -> Iterator[bytes]:
    """Every prefix (in short runs some), and as many flips of a random bit."""
    for length in range(0, len(content), times(max(1, len(content) // 15), 1)):
        yield content[:length]
    for _ in range(flips):
        place = rng.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


REFUSED = (ValueError, CorruptVersionError)


def endure(kind: str, path: Path, read: Callable[[], Any], *, alike: int = 1, may_change: bool = False) -> None:
    """Damage one file in every way: it is refused with words, or what is read is what was written.

    ``alike`` files share the 10,000 flips of a kind.
    """
    whole, wanted, refused = path.read_bytes(), read(), 0
    rng = random.Random(kind)
    for content in damaged(whole, times(40, 10_000) // alike, rng):
        path.write_bytes(content)
        try:
            found = read()
        except REFUSED:
            refused += 1
        else:
            assert may_change or found == wanted, f"{kind}: {len(content)} of {len(whole)} bytes give another result"
    path.write_bytes(whole)
    assert read() == wanted
    assert refused > 0 or may_change


def test_damage_to_files_that_carry_no_digest_ends_no_process(tmp_path: Path) -> None:
    from realmops.journal import read_journal
    from realmops.refresh.follower import Follower, assign_exchange

    exchange = exchange_with_everything(tmp_path / "e")
    for role, holder in (("trainer", "trainer"), ("builder", "builder-0")):
        path = tmp_path / "e" / "alive" / role / f"{holder}.json"
        read = lambda: (exchange.describe_builders(), inspect_exchange(exchange.root, StillClock()))[1] and None  # noqa: E731
        endure(f"the {role}'s heartbeat", path, read, may_change=True)
    assignment = tmp_path / "assignment.json"
    assign_exchange(assignment, tmp_path / "e", tmp_path / "s", "a run")
    follower = Follower(assignment, None)
    endure("the assignment file", assignment, lambda: follower._read() and None, may_change=True)
    lines = [json.dumps({"stage": "ict", "step": step, "time": 1.0, "loss": 0.5}) + "\n" for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    path = tmp_path / "metrics.jsonl"
    endure("the journal", path, lambda: read_journal(path), may_change=True)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b"[]", b'{"exchange": 1, "snapshot": "s"}', b'{"exchange": "a\\u0000", "snapshot": "s"}',
        b"\x80\x04.",
    ],
)  # fmt: skip
def test_an_assignment_that_nobody_of_ours_wrote_is_passed_over(tmp_path: Path, content: bytes) -> None:
    from realmops.refresh.follower import Follower

    (tmp_path / "assignment.json").write_bytes(content)
    follower = Follower(tmp_path / "assignment.json", None)
    follower.poll_once()
    assert follower._builder is None
    (tmp_path / "assignment.json").unlink()
    (tmp_path / "assignment.json").symlink_to("/dev/zero")
    follower.poll_once()
    assert follower._builder is None


@pytest.fixture
def stage_folders(world: Any, tmp_path: Path) -> dict[str, Path]:
    """What stages hand over, one folder of each kind of file."""
    from small_world import tiny_models

    from realmops.model.reader_files import save_models
    from realmops.train.checkpoints import FolderCheckpoints

    models = tmp_path / "models"
    models.mkdir()
    save_models(models, *tiny_models(world), world.text)
    (models / "metrics.json").write_text(json.dumps({"em": 0.5}))
    write_manifest(models, "ict", fingerprint="f", sections={"run": {"seed": 0}})
    shutil.copytree(world.snapshot.folder, tmp_path / "snapshot")
    FolderCheckpoints(tmp_path / "work").save(3, {"tensors.bin": bytes(300), "state.json": b"{}"})
    return {"ict": models, "snapshot": tmp_path / "snapshot", "checkpoint": tmp_path / "work" / "step-00000003"}


@pytest.mark.parametrize("kind", ["ict", "snapshot", "checkpoint"])
def test_damage_to_what_a_stage_handed_over(stage_folders: dict[str, Path], kind: str) -> None:
    folder = stage_folders[kind]
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for path in paths:
        alike = sum(path.suffix == other.suffix for other in paths)
        endure(f"{kind}: {path.relative_to(folder)}", path, lambda: read_manifest(folder, kind), alike=alike)


# Pickles


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_planted_anywhere_is_never_run(stage_folders: dict[str, Path], tmp_path: Path) -> None:
    """In the place of every file, with manifests that list it as it is."""
    import pickle

    import numpy as np
    import torch

    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.evaluate.predictions import read_predictions
    from realmops.hub import read_weights
    from realmops.model.reader_files import load_models
    from realmops.model.retriever_files import retriever_from_files
    from realmops.refresh.follower import Follower
    from realmops.search.embeddings import load_index
    from realmops.train.checkpoints import FolderCheckpoints
    from realmops.train.loop import STATE, TENSORS, _restore

    mark = tmp_path / "mark"
    torch.save(Evil(mark), tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    evils = [pickle.dumps(Evil(mark)), (tmp_path / "evil.pt").read_bytes(), (tmp_path / "evil.npy").read_bytes()]
    pickle.loads(evils[0])
    assert mark.exists(), "the pickles are live ones"
    mark.unlink()
    snapshot = Snapshot.open(stage_folders["snapshot"])
    index = tmp_path / "index"
    index.mkdir()
    exchange = exchange_with_everything(tmp_path / "e")

    def use_snapshot() -> None:
        found = Snapshot.open(stage_folders["snapshot"])
        assert found.text(0)
        assert found.tokenizer
        assert found.given_spans()

    def use_models() -> None:
        load_models(stage_folders["ict"], snapshot.vocabulary_hash)

    def use_checkpoint() -> None:
        class Context:
            checkpoints = FolderCheckpoints(tmp_path / "work")

        files = FolderCheckpoints(tmp_path / "work").restore()
        assert files
        FolderCheckpoints(tmp_path / "work").save(4, {TENSORS: files["tensors.bin"], STATE: files["state.json"]})
        _restore(Context(), None)  # type: ignore[arg-type]

    def use_version() -> None:
        retriever_from_files(exchange.weights.load(version_name(2, 0)).files)

    def plant_version(content: bytes) -> None:
        writer = Exchange(exchange.root, IDENTITY, "trainer", clock=StillClock()).weights
        shutil.rmtree(writer.folder / version_name(2, 0), ignore_errors=True)
        writer.publish(version_name(2, 0), {"realmops.json": content, "model.safetensors": content}, {})

    def plant(path: Path, kind: str | None, content: bytes) -> None:
        path.write_bytes(content)
        if kind:
            made = ("schema", "kind", "files", "manifest_digest")
            fields = {k: v for k, v in manifests[kind].items() if k not in made}
            write_manifest(stage_folders[kind], kind, **fields)

    manifests = {kind: read_manifest(folder, kind) for kind, folder in stage_folders.items()}
    uses: list[tuple[Path, str | None, Callable[[], Any]]] = [
        *((path, "snapshot", use_snapshot) for path in stage_folders["snapshot"].rglob("*.*")),
        *((path, "ict", use_models) for path in stage_folders["ict"].rglob("*.*")),
        *((path, "checkpoint", use_checkpoint) for path in stage_folders["checkpoint"].iterdir()),
        (index / "index.safetensors", None, lambda: load_index(index, snapshot)),
        (tmp_path / "encoder" / "pytorch_model.bin", None, lambda: read_weights(tmp_path / "encoder")),
        (tmp_path / "coder" / "model.safetensors", None, lambda: read_weights(tmp_path / "coder")),
        (tmp_path / "predictions.parquet", None, lambda: read_predictions(tmp_path / "predictions.parquet")),
        (tmp_path / "assignment.json", None, lambda: Follower(tmp_path / "assignment.json", None).poll_once()),
        *((path, None, lambda: inspect_exchange(exchange.root)) for path in (exchange.root / "alive").rglob("*.json")),
        *((path, None, lambda: inspect_exchange(exchange.root)) for path in exchange.root.glob("*/v-*/*")),
    ]
    for content in evils:
        for path, kind, use in uses:
            path.parent.mkdir(exist_ok=True)
            before = path.read_bytes() if path.exists() else b""
            plant(path, kind, content)
            try:
                use()
            except (AttributeError, NameError):  # of this test: a misspelt call would reach no reader
                raise
            except Exception:
                pass
            assert not mark.exists(), path
            plant(path, kind, before)
        plant_version(content)
        with pytest.raises(Exception, match=r"."):
            use_version()
        assert not mark.exists()


def test_mlflow_listens_on_loopback_unless_told_otherwise() -> None:
    """Of ours `realmops serve` alone listens, on loopback too; the other documented commands that do are MLflow's."""
    import mlflow.cli

    from realmops.cli import main

    for command in (mlflow.cli.cli.commands["server"], main.commands["serve"]):
        [host] = [option for option in command.params if option.name == "host"]
        assert host.default == "127.0.0.1"
    root = Path(__file__).parents[2]
    serving = {root / "docs/serve.md", root / "docs/commands.md", root / "src/realmops/serve/server.py"}
    for path in {root / "README.md", *(root / "docs").glob("*.md"), *(root / "src").rglob("*.py")} - serving:
        for words in ("0.0.0.0", "HTTPServer", ".bind(", ".listen("):
            if not (words == "0.0.0.0" and path.name == "answering_commands.py"):  # what --host says of it
                assert words not in path.read_text(encoding="utf-8"), path


# Long runs


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_a_run_of_fifty_times_the_length_keeps_its_files_and_its_room(tmp_path: Path) -> None:
    plan, seen = Plan(steps=times(300, 3000)), list[tuple[int, int, int]]()
    builder: list[Builder] = []

    def build() -> None:
        if not builder:
            builder.append(builder_on(Files(), StillClock(), root=tmp_path / "e"))
        builder[0].build_next()
        builder[0].exchange.collect_garbage()

    def look(step: int) -> None:
        if step % 20 == 0:
            entries = len([*(tmp_path / "e").rglob("*")]) - len(os.listdir(tmp_path / "e" / "fences"))
            seen.append((open_files(), entries, bytes_under(tmp_path / "e")))

    exchange = Exchange.open(tmp_path / "e", IDENTITY, files=Files(), clock=StillClock(build), grace=0.0)
    with FailingDisk(0, "short"):  # without fsync
        life(exchange, plan, each_step=look)
    first, last = seen[1], seen[-1]
    assert last[0] == first[0]
    assert last[1] <= first[1]
    assert last[2] <= 1.02 * first[2]
