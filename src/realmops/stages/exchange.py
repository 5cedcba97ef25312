"""The exchange as a stage has it: the trainer's side for a training loop, and the index builder as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from realmops.corpus.snapshot import Snapshot
from realmops.index.builder import MISCONFIGURED
from realmops.index.exchange import Exchange, Fenced
from realmops.index.mips import PassageIndex
from realmops.index.staleness import generation_in_use
from realmops.index.trainer import Policy, Trainer
from realmops.index.versions import Version
from realmops.model.files import retriever_files, retriever_from_files
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.builder import EMBEDDINGS, identity
from realmops.stages.common import embeddings_in
from realmops.train.pretrain import Index

BUILDER_LOG = "index-builder.log"
QUIET_SECONDS = 5.0  # a shorter wait is not worth a line


@dataclass(frozen=True)
class Refresh:
    """When a training of ``steps`` steps publishes its weights and adopts their index, and who builds it."""

    steps: int
    every: int
    lag: int
    adopt: str
    delay: int  # first steps in which the retriever stands still
    builder: str  # child or external
    exchange: str  # a folder, or auto
    shard_rows: int


@contextmanager
def exchange(
    job: Job,
    snapshot: Snapshot,
    retriever: Retriever,
    refresh: Refresh,
    policy: Policy,
    device: torch.device,
    dtype: torch.dtype,
    passages: Callable[[Tensor, Retriever], PassageIndex],
) -> Iterator[ExchangeSource]:
    """A training's side of an exchange, with its builder beside it where that is a child; the last word at the end.

    ``passages`` makes a searchable index from the embeddings of a generation and its retriever.
    """
    root = job.work / "exchange" if refresh.exchange == "auto" else Path(refresh.exchange)
    card = identity(
        snapshot,
        run_key=job.work.name,
        embedding_width=retriever.query.width,
        precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
        threads=job.sections["run"].threads,
        part_rows=refresh.shard_rows,
    )
    child = ChildBuilder(root, snapshot.folder, job.work / BUILDER_LOG) if refresh.builder == "child" else None

    def on_wait(message: str, seconds: float) -> None:
        if child is not None:
            child.keep_alive()
        if seconds >= QUIET_SECONDS:
            job.report.say(message)

    trainer = Trainer(Exchange.open(root, card, grace=0.0 if refresh.builder == "child" else 120.0), policy, on_wait)
    try:
        with child or nullcontext():
            yield ExchangeSource(trainer, refresh, snapshot.vocabulary_hash, device, passages)
            trainer.finish("done")
    except (ValueError, TimeoutError, ChildProcessError, RuntimeError) as error:
        with suppress(Fenced):  # the last word is the successor's
            trainer.finish("failed", str(error))
        raise


class ExchangeSource:
    """The trainer's side of the exchange as the training loop wants it: checkpoints, and an index for each step."""

    def __init__(
        self,
        trainer: Trainer,
        refresh: Refresh,
        vocabulary_hash: str,
        device: torch.device,
        passages: Callable[[Tensor, Retriever], PassageIndex],
    ) -> None:
        self.trainer, self.refresh, self.vocabulary_hash, self.device = trainer, refresh, vocabulary_hash, device
        self.passages = passages  # from the embeddings of a generation and its retriever
        self.waited = 0.0  # seconds, in all lives of the run
        self.refreshes = 0
        self._step: int | None = None  # of the index in use

    def restore(self) -> dict[str, bytes] | None:
        """The newest checkpoint's files."""
        version = self.trainer.restore()
        if version is None:
            return None
        self.refreshes = version.meta["trainer"]["refreshes"]
        self.waited = version.meta["trainer"]["waited"]
        return version.files

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint to the exchange."""
        self.trainer.save_checkpoint(step, files, {"refreshes": self.refreshes, "waited": self.waited})

    def at_step(self, step: int, retriever: Retriever) -> Index | None:
        """Publish the weights when it is time, and adopt an index when one is due."""
        self.trainer.beat(step)
        if self._publishes(step):
            files = retriever_files(retriever, self.vocabulary_hash)
            self.trainer.publish_weights(step, files, {"published": time.time()})
        used = self.trainer.index_step
        started = time.perf_counter()
        version = self._due(step)
        if self.refresh.adopt == "as_soon_as_ready":
            new = step == 0 or (version is not None and version.step != used)
        else:
            new = step == 0 or self._generation(step) != self._generation(step - 1)
        self.waited += time.perf_counter() - started
        if version is None:
            return None
        self._step = version.step
        self.refreshes += int(new and step > 0)
        embedding_PE = embeddings_in(version.files[EMBEDDINGS])
        searcher = retriever_from_files(version.files).to(self.device).eval()
        passages = self.passages(embedding_PE, searcher)
        return Index(version.step, passages, searcher, float(version.meta["published"]), new)

    def _due(self, step: int) -> Version | None:
        if self.refresh.adopt == "as_soon_as_ready":
            return self.trainer.newest_index(step)
        wanted = self._generation(step)
        return None if wanted == self._step else self.trainer.index_for(wanted)

    def _publishes(self, step: int) -> bool:
        """At step 0 and every ``refresh_every`` steps; not while the retriever stands still, nor what nobody adopts."""
        if step == 0 or self.trainer.lacks_index:
            return True
        in_time = self.refresh.adopt != "fixed_lag" or step + self.refresh.lag < self.refresh.steps
        return step % self.refresh.every == 0 and step > self.refresh.delay and in_time

    def _generation(self, step: int) -> int:
        """The step whose weights the index of ``step`` is made from, under ``fixed_lag``."""
        wanted = generation_in_use(step, refresh_every=self.refresh.every, lag=self.refresh.lag)
        return wanted if wanted > self.refresh.delay else 0


class ChildBuilder:
    """The index builder as a child process: ends with this one, and is started again when it was killed."""

    MOST_STARTS = 20

    def __init__(self, root: Path, snapshot: Path, log: Path) -> None:
        self.log, self.starts = log, 0
        arguments = ["--exchange", str(root), "--snapshot", str(snapshot), "--watch-parent", str(os.getpid())]
        self.command = [sys.executable, "-m", "realmops", "index-builder", *arguments]

    def __enter__(self) -> ChildBuilder:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        self.starts += 1
        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "HOSTNAME": "child"},
            )

    def keep_alive(self) -> None:
        """Start it again when it has ended; ChildProcessError when that is of no use."""
        code = self.process.poll()
        if code is None:
            return
        if code == MISCONFIGURED or self.starts >= self.MOST_STARTS:
            last = self.log.read_text(errors="replace").splitlines()[-5:]
            raise ChildProcessError(
                f"the index builder ended with exit code {code} after {self.starts} starts:\n" + "\n".join(last)
            )
        self._start()
