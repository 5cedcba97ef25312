"""Helpers of the exchange's tests: a volume in memory that can lose power, faults, and a toy REALM run.

The toy run trains 32 bytes by hashing them with what the index in use holds, so that one wrong, torn or
mixed byte anywhere changes the end of the run. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops.files import Clock, Files
from realmops.refresh.builder import Builder, BuilderWork, run_builder
from realmops.refresh.child_processes import end_with
from realmops.refresh.exchange import Exchange
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import Version

IDENTITY = {"corpus": "c0ffee", "vocabulary": "beef", "dimensions": 4}
ROWS, PART_ROWS = 5, 3  # two parts
ROOT = Path("/volume/exchange")


class Killed(BaseException):
    """The process ended here: nothing after this point may touch the volume."""


class StillClock(Clock):
    """Time that passes only by sleeping; whoever sleeps lets others work."""

    def __init__(self, while_asleep: Callable[[], None] = lambda: None) -> None:
        self.now, self.while_asleep = 0.0, while_asleep

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return 1e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_asleep()


@dataclass
class Inode:
    """A file (data) or a folder (names); what a power cut leaves is in the ``durable`` twins."""

    names: dict[str, Inode] | None = None
    durable_names: dict[str, Inode] = field(default_factory=dict)
    data: bytes = b""
    durable_data: bytes = b""


class MemoryFiles(Files):
    """The file layer over a tree in memory, one step at a time, through the same ``around``."""

    def __init__(self, around: Any = None, top: Inode | None = None) -> None:
        super().__init__(around)
        self.top = top or Inode(names={})

    def seen_by(self, around: Any) -> MemoryFiles:
        """Return the volume as another process sees it."""
        return type(self)(around, self.top)

    def _at(self, path: Path) -> Inode:
        node = self.top
        for part in path.parts[1:]:
            if node.names is None or part not in node.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            node = node.names[part]
        return node

    def _folder(self, path: Path) -> dict[str, Inode]:
        names = self._at(path).names
        assert names is not None, path
        return names

    def listdir(self, folder: Path) -> list[str]:
        try:
            return sorted(self._around("listdir", folder, lambda: list(self._folder(folder))))
        except FileNotFoundError:
            return []

    def read(self, path: Path, limit: int, *, copied: bool = False, depth: int = 1) -> bytes:
        content: bytes = self._around("read", path, lambda: self._at(path).data)
        if len(content) > limit:
            raise ValueError(f"{path} has {len(content)} bytes, more than the expected {limit}")
        return content

    def write(self, path: Path, content: bytes) -> None:
        node: Inode = self._around("create", path, lambda: self._create(path))
        self._around("write", path, lambda: setattr(node, "data", content))
        self._around("fsync", path, lambda: self.fsync(node))

    def fsync(self, node: Inode) -> None:
        node.durable_data = node.data

    def _create(self, path: Path) -> Inode:
        names = self._folder(path.parent)
        if path.name in names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        names[path.name] = Inode()
        return names[path.name]

    def replace(self, path: Path, content: bytes) -> None:
        new = Inode(data=content)
        self._around("rename", path, lambda: self._folder(path.parent).__setitem__(path.name, new))

    def mkdir(self, folder: Path) -> None:
        self._around("mkdir", folder, lambda: self._mkdir(folder))

    def _mkdir(self, folder: Path) -> None:
        self._create(folder).names = {}

    def rename(self, old: Path, new: Path) -> None:
        self._around("rename", new, lambda: self._rename(old, new))

    def _rename(self, old: Path, new: Path) -> None:
        node = self._at(old)
        names = self._folder(new.parent)
        if new.name in names and names[new.name].names:
            raise OSError(errno.ENOTEMPTY, "not empty", str(new))
        del self._folder(old.parent)[old.name]
        names[new.name] = node

    def sync_folder(self, folder: Path) -> None:
        self._around("sync_folder", folder, lambda: self.fsync_folder(folder))

    def sync_folders(self, folder: Path) -> None:
        for name, node in sorted(self._folder(folder).items()):
            if node.names is not None:
                self.sync_folders(folder / name)
        self.sync_folder(folder)

    def fsync_folder(self, folder: Path) -> None:
        self._at(folder).durable_names = dict(self._folder(folder))

    def unlink(self, path: Path) -> None:
        self._around("unlink", path, lambda: self._unlink(path))

    def rmdir(self, folder: Path) -> None:
        self._around("rmdir", folder, lambda: self._remove(folder))

    def _unlink(self, path: Path) -> None:
        if self._at(path).names is not None:
            raise IsADirectoryError(errno.EISDIR, "a folder", str(path))
        self._remove(path)

    def _remove(self, path: Path) -> None:
        if self._at(path).names:
            raise OSError(errno.ENOTEMPTY, "not empty", str(path))
        del self._folder(path.parent)[path.name]

    def power_cut(self, rng: random.Random) -> None:
        """Keep, lose or (data) halve what was not synced; each node independently."""
        self._cut(self.top, rng, {})

    def _cut(self, node: Inode, rng: random.Random, done: dict[int, bool]) -> None:
        if id(node) in done:
            return
        done[id(node)] = True
        if node.names is None:
            if node.data != node.durable_data:
                node.data = rng.choice([node.data, node.durable_data, b"", node.data[: len(node.data) // 2]])
        else:
            node.names = dict(rng.choice([node.names, node.durable_names]))
            for child in [*node.names.values()]:
                self._cut(child, rng, done)


class Fault:
    """At the n-th operation (from 0) the process is killed, or gets EIO before the operation or after it."""

    def __init__(self, at: int, kind: str = "kill") -> None:
        self.at, self.kind, self.is_dead = at, kind, False
        self.operations: list[tuple[str, Path]] = []

    def __call__(self, operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if self.is_dead:
            raise Killed
        self.operations.append((operation, path))
        if len(self.operations) != self.at + 1:
            return effect()
        if self.kind == "kill":
            self.is_dead = True
            raise Killed
        if self.kind == "applied but error":
            effect()
        raise OSError(errno.EIO, self.kind, str(path))


def forked(work: Callable[[], int]) -> int:
    """The id of a new process that does ``work`` and ends with the exit code that it gives."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def end_of(pid: int) -> int:
    """0, an exit code, or the negative number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def embed(params: bytes, first: int, end: int) -> bytes:
    return b"".join(hashlib.sha256(params + bytes([row])).digest() for row in range(first, end))


def embedder(weights: Version) -> Callable[[int, int], dict[str, bytes]]:
    return lambda first, end: {"rows.bin": embed(weights.files["params.bin"], first, end)}


def merge(weights: Version, parts: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    rows = b"".join(files["rows.bin"] for files in parts)
    return {"rows.bin": rows, "params.bin": weights.files["params.bin"]}, {"recall": 1.0}


WORK = BuilderWork(ROWS, PART_ROWS, embedder, merge)


def check_index(index: Version) -> None:
    """I1: neither torn nor mixed: all rows are embedded with the parameters that are stored next to them."""
    assert index.files["rows.bin"] == embed(index.files["params.bin"], 0, ROWS)
    assert index.meta["step"] == index.step


FIXED_LAG = RefreshPolicy(builder_timeout=1e6)
PARAMS = {"params.bin": b"p" * 32}


def open_trainer(
    files: Files, policy: RefreshPolicy = FIXED_LAG, clock: Clock | None = None, **more: Any
) -> TrainerSide:
    exchange = Exchange.open(ROOT, IDENTITY, files=files, clock=clock or StillClock(), grace=0.0)
    return TrainerSide(exchange, policy, **more)


@dataclass(frozen=True)
class Plan:
    steps: int = 6
    refresh: int = 2
    lag: int = 1
    checkpoint: int = 2
    policy: RefreshPolicy = FIXED_LAG


def learn(params: bytes, step: int, index: Version) -> bytes:
    return hashlib.sha256(params + bytes([step % 256]) + index.files["rows.bin"]).digest()


def life(exchange: Exchange, plan: Plan, on_wait: Any = None, each_step: Any = None) -> bytes:
    """One life of the toy trainer, from its newest checkpoint to the end; its parameters."""
    trainer = TrainerSide(exchange, plan.policy, on_wait=on_wait or (lambda message, seconds: None))
    checkpoint = trainer.restore()
    step, params, index = 0, bytes(32), None
    if checkpoint is None:
        trainer.save_checkpoint(0, {"params.bin": params}, {})
    else:
        step, params = checkpoint.step, checkpoint.files["params.bin"]
    fixed = plan.policy.adopt == "fixed_lag"
    if fixed and checkpoint is not None and checkpoint.meta["index"]:
        index = trainer.index_for(trainer.index_step)
    adopted = [trainer.index_step]
    while step < plan.steps:
        trainer.beat(step)
        if step % plan.refresh == 0 or trainer.lacks_index:
            trainer.publish_weights(step, {"params.bin": params}, {})
        due = step - plan.lag
        if fixed and index is None:
            index = trainer.index_for(0)
        elif fixed and due > 0 and due % plan.refresh == 0:
            index = trainer.index_for(due)
        elif not fixed:
            index = trainer.newest_index(step) or index
        check_index(index)
        adopted.append(index.step)
        params = learn(params, step, index)
        step += 1
        if each_step is not None:
            each_step(step)
        if step % plan.checkpoint == 0:
            trainer.save_checkpoint(step, {"params.bin": params}, {"loss": 0.5})
    assert adopted == sorted(adopted), "I2: generations never go back within a life"
    trainer.finish("done")
    return params


def undisturbed(plan: Plan) -> bytes:
    """The end of a fixed_lag run by the definition: no exchange, no files."""
    params = [bytes(32)]
    for step in range(plan.steps):
        due = step - plan.lag
        generation = max(0, due - due % plan.refresh) if due >= 0 else 0
        rows = embed(params[generation], 0, ROWS)
        params.append(hashlib.sha256(params[-1] + bytes([step % 256]) + rows).digest())
    return params[-1]


def builder_on(files: Files, clock: Clock, name: str = "0", root: Path = ROOT) -> Builder:
    exchange = Exchange.open(root, IDENTITY, f"builder-{name}", files=files, clock=clock, grace=0.0)
    return Builder(exchange, WORK, on_status=lambda message: None)


def exchange_with_everything(root: Path) -> Exchange:
    """A checkpoint, weights, a part and an index, and heartbeats."""
    trainer = TrainerSide(Exchange.open(root, IDENTITY, clock=StillClock(), grace=0.0))
    trainer.save_checkpoint(0, PARAMS, {})
    trainer.publish_weights(0, PARAMS, {})
    trainer.beat(0)
    builder = builder_on(Files(), StillClock(), root=root)
    builder.exchange.beat("waiting for weights")
    assert builder.build_next()
    unsynced = Files(lambda operation, path, effect: None if "sync" in operation else effect())
    return Exchange(root, IDENTITY, "trainer", clock=StillClock(), files=unsynced)


def sound(files: Files, root: Path = ROOT) -> None:
    """Everything that can be seen is whole; leftovers have other names."""
    exchange = Exchange(root, IDENTITY, "builder-checker", files=files, clock=StillClock(), grace=0.0)
    for store in exchange.stores.values():
        for name in store.names():
            store.unpin(store.load(name))


def main() -> None:
    """``exchange_lab.py <root> [name]``: a builder; one with a name ends with the process that started it."""
    root, *names = sys.argv[1:]
    if names:
        end_with(os.getppid())
    status = lambda message: print(message, flush=True)  # noqa: E731
    sys.exit(run_builder(Path(root), IDENTITY, WORK, name=(names or "0")[0], poll=0.02, grace=0.0, on_status=status))


if __name__ == "__main__":
    main()
