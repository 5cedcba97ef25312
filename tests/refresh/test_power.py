"""What a power cut may not take: each commit of a stage, a checkpoint or the exchange, by the system's own calls.

The order is: the bytes, their fsync, the fsync of the folder that holds them, the rename that commits, the fsync of
the folder that holds the name. tests/power.py records it on real folders.
"""

import ast
import os
import shutil
from collections.abc import Callable
from os import rename as renamed_by_another_name
from pathlib import Path
from typing import Any

import pytest
from exchange_lab import IDENTITY, Plan, StillClock, builder_on, life
from power import Disk

import realmops
from realmops import artifacts
from realmops.files import Files
from realmops.journal import Journal
from realmops.refresh.exchange import Exchange
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import MAX_QUARANTINED, CorruptVersionError, VersionStore
from realmops.train.checkpoints import FolderCheckpoints

# The recorder


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def commit(top: Path, without: str, rename: Callable[[Path, Path], Any]) -> None:
    """Put a folder with a file into the place of another as it should be done, but for one sync."""
    draft, final, old = top / ".draft", top / "final", top / ".old"
    draft.mkdir()
    (draft / "file").write_bytes(b"new")
    if without != "file":
        sync(draft / "file")
    if without != "folder":
        sync(draft)
    rename(final, old)
    rename(draft, final)
    if without != "name":
        sync(top)
    shutil.rmtree(old)


def before(top: Path) -> Path:
    (top / "final").mkdir()
    (top / "final" / "file").write_bytes(b"old")
    return top


@pytest.mark.parametrize("rename", [os.rename, renamed_by_another_name, Path.rename, Path.replace, shutil.move])
def test_the_recorder_sees_each_sync_that_is_missing(tmp_path: Path, rename: Callable[[Path, Path], Any]) -> None:
    problems = {
        "file": "final is committed before it is safe: the bytes of .*file",
        "folder": "final is committed before it is safe: the name of .*file",
        "name": "is deleted, which a power cut would bring back as .*final",
    }
    for without, problem in problems.items():
        top = tmp_path / without
        top.mkdir()
        with pytest.raises(AssertionError, match=problem), Disk(before(top)):
            commit(top, without, rename)
    (tmp_path / "right").mkdir()
    with Disk(before(tmp_path / "right")) as disk:
        commit(tmp_path / "right", "", rename)
        assert not disk.lost(tmp_path / "right" / "final" / "file")
    assert disk.commits == [tmp_path / "right" / "final"]


def test_the_recorder_sees_names_and_bytes_that_are_not_synced(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        (tmp_path / "deep" / "er").mkdir(parents=True)
        (tmp_path / "deep" / "er" / "file").write_bytes(b"1")
        assert len(disk.lost(tmp_path / "deep" / "er" / "file")) == 4  # three names, and the bytes
        sync(tmp_path / "deep" / "er" / "file")
        sync(tmp_path / "deep" / "er")
        assert disk.lost(tmp_path / "deep" / "er" / "file") == [f"the name of {tmp_path / 'deep'}/er",
                                                                f"the name of {tmp_path / 'deep'}"]  # fmt: skip


# Files and folders of stages


def test_a_file_is_safe_when_it_has_its_name(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        for value in (1, 2):
            artifacts.write_json(tmp_path / "value.json", value)
            assert not disk.lost(tmp_path / "value.json")
            artifacts.write_bytes(tmp_path / "bytes", b"%d" % value)
            assert not disk.lost(tmp_path / "bytes")
    assert len(disk.commits) == 4


def test_a_folder_is_safe_when_it_has_its_name_and_what_it_replaces_stays_until_then(tmp_path: Path) -> None:
    final = tmp_path / "build" / "deep" / "stage"
    with Disk(tmp_path) as disk:
        for value in (b"old", b"new"):
            with artifacts.atomic_folder(final) as stage:
                (stage / "part" / "below").mkdir(parents=True)
                (stage / "part" / "below" / "file").write_bytes(value)
                (stage / "file").write_bytes(value)
                artifacts.write_manifest(stage, "test")
            assert not disk.lost(final)
        with artifacts.atomic_folder(final) as stage:
            (stage / "file").write_bytes(b"without a manifest, whose commit would sync the folder")
        assert not disk.lost(final)
    assert disk.commits.count(final) == 3


def test_a_checkpoint_and_the_journal_up_to_it_are_safe_before_older_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "checkpoints"
    positions: list[int] = []

    def published(path: Path) -> None:
        if path.parent == folder:
            assert len(disk.safe_bytes(tmp_path / "work" / "metrics.jsonl")) >= positions[-1] > 0

    with Disk(tmp_path, published=published) as disk:
        checkpoints = FolderCheckpoints(folder)
        with Journal(tmp_path / "work" / "metrics.jsonl", "test") as journal:
            for step in range(1, 5):
                journal.log(step, loss=1.0)
                positions.append(journal.position())
                assert not disk.lost(journal.path)
                checkpoints.save(step, {"state.json": b"%d" % step, "tensors": b"0" * step})
                assert not disk.lost(folder / f"step-{step:08d}")
    assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000004"]
    assert sum(path.parent == folder for path in disk.commits) == 4


# The exchange


def hint(path: Path) -> bool:
    """Signs of life, of which nothing is promised."""
    return "alive" in path.parts


def test_whatever_the_exchange_has_committed_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, publish = tmp_path / "deep" / "exchange", VersionStore.publish

    def published(store: VersionStore, name: str, *arguments: Any) -> bool:
        mine = publish(store, name, *arguments)
        assert not disk.lost(store.folder / name)
        return mine

    monkeypatch.setattr(VersionStore, "publish", published)
    with Disk(tmp_path, hints=hint) as disk:
        clock = StillClock()
        exchange = Exchange.open(root, IDENTITY, clock=clock, grace=0.0)
        for folder in ("fences", "weights", "parts", "indexes", "checkpoints", "finished", "pins/builder"):
            assert not disk.lost(root / folder)
        builder = builder_on(Files(), clock, root=root)

        def on_sleep() -> None:
            builder.build_next()
            builder.exchange.collect_garbage()

        clock.while_asleep = on_sleep
        life(exchange, Plan(steps=6, policy=RefreshPolicy(builder_timeout=1e6)))
        assert os.listdir(root / "fences") == ["000001"]
        assert not disk.lost(root / "fences")
    kinds = {"run", "checkpoints", "weights", "parts", "indexes", "finished"}
    assert {path.parent.name for path in disk.commits} - {"trainer", "builder"} == kinds
    assert len(os.listdir(root / "checkpoints")) == 2, "older ones were removed"


def test_what_is_set_aside_or_brought_back_stays_so_after_a_power_cut(tmp_path: Path) -> None:
    with Disk(tmp_path, hints=hint) as disk:
        trainer = TrainerSide(Exchange.open(tmp_path / "exchange", IDENTITY, grace=0.0, clock=StillClock()))
        store = trainer.exchange.weights
        for step in range(MAX_QUARANTINED + 2):
            trainer.publish_weights(step, {"params.bin": b"right"}, {})
            name = store.names()[-1]
            (store.folder / name / "params.bin").write_bytes(b"wrong")
            with pytest.raises(CorruptVersionError):
                store.load(name)
            store.quarantine(name, "test")
            assert name not in disk.safe_names(store.folder), "a power cut would bring it back"
        assert len(store.quarantined()) == MAX_QUARANTINED
        trainer.publish_weights(100, {"params.bin": b"right"}, {})
        name = store.names()[-1]
        asked: list[set[str]] = [set(), {name}]  # nobody needs it, until somebody does
        store.collect(lambda: asked.pop(0))
        assert store.names() == [name]
        assert not disk.lost(store.folder / name)


# Nothing goes round it


def test_renames_are_made_in_few_places() -> None:
    """A new module that commits by a rename of its own wants a test here."""
    top = Path(realmops.__file__).parent
    # ablate: links that may be lost; clean: before a
    # deletion, which is then repeated; dvc_project: into a draft
    known = {
        "artifacts.py", "files.py", "commands/ablate.py", "cluster/clean.py",
        "inputs/dvc_project.py",
    }  # fmt: skip
    found = set()
    for path in sorted(top.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
                assert not {"rename", "replace", "link", "move"} & {name.name for name in node.names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                calls = {("os", "rename"), ("os", "replace"), ("os", "renames"), ("shutil", "move")}
                of_path = node.func.attr in ("rename", "replace") and len(node.args) == 1 and not node.keywords
                if (of, node.func.attr) in calls or (of_path and of not in ("self", "files")):
                    found.add(path.relative_to(top).as_posix())
    assert found - {"refresh/versions.py"} == known, "it asks files.py"
