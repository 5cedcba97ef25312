"""The campaign against faults: failing disks, damaged files, old listings, long runs.

``make test`` runs it cut short, ``make faults`` at full length. Kills are in test_schedules.py (simulated) and, by
SIGKILL, in test_pipeline_local.py.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import (
    IDENTITY,
    ROOT,
    WORK,
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

from realmops.artifacts import read_manifest, write_manifest
from realmops.files import Files
from realmops.refresh.builder import Builder
from realmops.refresh.exchange import Exchange, inspect_exchange
from realmops.refresh.trainer import RefreshPolicy
from realmops.refresh.versions import CorruptVersionError, version_name

pytestmark = pytest.mark.faults
PLAN = Plan(steps=4)
AS_SOON = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6, poll=5.0)


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


# Listings


@pytest.mark.parametrize("plan", [PLAN, Plan(steps=4, policy=AS_SOON)], ids=["fixed_lag", "as_soon_as_ready"])
def test_an_old_listing_delays_and_changes_nothing(plan: Plan) -> None:
    """Both sides see each listing for a minute, on clocks that are a day apart."""
    volume, there = MemoryFiles(), StillClock()
    there.unix = lambda: there.now - 86400.0  # type: ignore[method-assign]
    mounts = [StaleFiles(None, volume.top, there, 60.0)]
    builders: list[Builder] = []

    def build() -> None:
        there.now = here.now
        with suppress(OSError):
            if not builders:
                exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=mounts[0], clock=there, grace=120.0)
                builders.append(Builder(exchange, WORK, on_status=lambda message: None))
            builders[0].build_next()
            builders[0].exchange.collect_garbage()

    here = StillClock(build)
    mounts.append(StaleFiles(None, volume.top, here, 60.0))
    exchange = Exchange.open(ROOT, IDENTITY, files=mounts[1], clock=here, grace=120.0)
    params = life(exchange, plan, each_step=lambda step: here.sleep(7.0))
    assert plan is not PLAN or params == undisturbed(plan)
    sound(volume)
    assert sum(files.old for files in mounts) > 0


# Damaged files


def damaged(content: bytes, flips: int, rng: random.Random) -> Iterator[bytes]:
    """Every prefix (in short runs some), and as many flips of a random bit."""
    for length in range(0, len(content), times(max(1, len(content) // 15), 1)):
        yield content[:length]
    for _ in range(flips):
        place = rng.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def endure(kind: str, path: Path, read: Callable[[], Any]) -> None:
    """Damage one file in every way: it is read, or refused with a message."""
    rng = random.Random(kind)
    for content in damaged(path.read_bytes(), times(40, 10_000), rng):
        path.write_bytes(content)
        with suppress(ValueError, CorruptVersionError):
            read()


def test_damage_to_files_that_carry_no_digest_ends_no_process(tmp_path: Path) -> None:
    from realmops.journal import read_journal
    from realmops.refresh.follower import Follower, assign_exchange

    exchange = exchange_with_everything(tmp_path / "e")
    for role, holder in (("trainer", "trainer"), ("builder", "builder-0")):
        path = tmp_path / "e" / "alive" / role / f"{holder}.json"
        read = lambda: (exchange.describe_builders(), inspect_exchange(exchange.root, StillClock()))[1] and None  # noqa: E731
        endure(f"the {role}'s heartbeat", path, read)
    assignment = tmp_path / "assignment.json"
    assign_exchange(assignment, tmp_path / "e", tmp_path / "s", "a run")
    follower = Follower(assignment, None)
    endure("the assignment file", assignment, lambda: follower._read() and None)
    lines = [json.dumps({"stage": "ict", "step": step, "time": 1.0, "loss": 0.5}) + "\n" for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    path = tmp_path / "metrics.jsonl"
    endure("the journal", path, lambda: read_journal(path))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b"[]", b'{"exchange": 1, "snapshot": "s"}', b'{"exchange": "a\\u0000", "snapshot": "s"}',
        b"\x80\x04.",
    ],
)  # fmt: skip
def test_an_assignment_of_another_origin_is_ignored(tmp_path: Path, content: bytes) -> None:
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


def test_mlflow_listens_on_loopback_by_default() -> None:
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
