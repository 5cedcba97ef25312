"""What the index refresh costs the trainer, and how stale the index is when the builder gets less of the machine.

    python benchmarks/refresh.py --subjects 100

The sample corpus at a reduced size. Pre-training with its index builder and a refresh every 50 steps takes turns with
the same training that keeps its first index; each is a process of its own. Steps a second are by the clock, over 50
steps in which one refresh falls: publishing, checkpoint, waiting, adopting and measuring the new index are all in it.
Then the index is adopted as soon as it is ready, from weights that are published every 10 steps, while the builder is
stopped and woken in turn so that it has a share of its core: mean staleness in steps for each share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

GOAL = Goal(0.95)
STEPS, EVERY, LAG = 100, 50, 25
STALE_STEPS, STALE_EVERY = 80, 10
PERIOD = 0.2  # seconds in which the builder runs for its share
PROJECT = Path(__file__).parents[1]
SMALL = {
    "tag.steps": 20,
    "ict.steps": 5,
    "ict.reader_steps": 5,
    "tracking.enabled": False,
    "pretrain.retriever_delay": 0,
}


def realmops(stage: str, root: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A stage as a process, its output in a file of the root."""
    words = [sys.executable, "-m", "realmops", "run", stage, "--force", "--params", str(PROJECT / "params.yaml")]
    words += ["--root", str(root), *(f"--set={name}={json.dumps(value)}" for name, value in settings.items())]
    with open(root / "log.txt", "ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], root: Path) -> None:
    """Wait for a stage; SystemExit with the end of its output when it failed."""
    if process.wait():
        last = (root / "log.txt").read_text(errors="replace").splitlines()[-5:]
        raise SystemExit("\n".join([f"a stage ended with exit code {process.returncode}:", *last]))


def builder_of(pid: int) -> int | None:
    """The index builder among the children of a process."""
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"index-builder" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
    return None


def throttle(process: subprocess.Popen[bytes], share: float) -> None:
    """Let the index builder of a stage run for a share of the time, until the stage has ended."""
    while process.poll() is None:
        builder = builder_of(process.pid) if share < 1 else None
        if builder is not None:
            with suppress(ProcessLookupError):
                os.kill(builder, signal.SIGSTOP)
                time.sleep(PERIOD * (1 - share))
                os.kill(builder, signal.SIGCONT)
        time.sleep(PERIOD * share)


def pretrain(root: Path, settings: dict[str, Any], share: float = 1.0) -> list[dict[str, float]]:
    """The lines of the journal of a pre-training."""
    process = realmops("pretrain", root, settings)
    try:
        throttle(process, share)
    finally:
        process.terminate()
        finish(process, root)
    lines = (root / "models" / "pretrain" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def spent(journal: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds in steps and between them, of one whole interval of refreshes: behind the second publication."""
    lines = [line for line in journal if line["step"] >= EVERY]
    return sum(line["step_seconds"] for line in lines), sum(line["between_seconds"] for line in lines)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Prepare a root, then the two comparisons."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings: dict[str, Any] = {**SMALL, "sample.subjects": arguments.subjects}
        for stage in ("sample", "snapshot", "tag", "ict"):
            finish(realmops(stage, root, settings), root)
        passages = json.loads((root / "data" / "snapshot" / "metrics.json").read_text())["passages"]
        return [_loss(root, settings, arguments.repeats, passages), *_staleness(root, settings, arguments)]


def _loss(root: Path, settings: dict[str, Any], repeats: int, passages: int) -> Row:
    between: list[float] = []

    def side(every: int) -> float:
        own = {"pretrain.steps": STEPS, "pretrain.refresh_every": every, "pretrain.lag": LAG}
        inside, outside = spent(pretrain(root, settings | own))
        if every == EVERY:
            between.append(outside / (inside + outside))
        return (STEPS - EVERY) / (inside + outside)

    ours, theirs = against.interleave([lambda: side(EVERY), lambda: side(10 * STEPS)], repeats)
    note = f"{passages} passages; {statistics.median(between):.1%} of the time passes between two steps"
    return Row("training with refreshes", "the same without", "steps/s", ours, theirs, GOAL, note)


def _staleness(root: Path, settings: dict[str, Any], arguments: argparse.Namespace) -> list[Row]:
    settings = settings | {
        "pretrain.steps": STALE_STEPS,
        "pretrain.refresh_every": STALE_EVERY,
        "pretrain.lag": "auto",
        "pretrain.masked_sentences": 20,
    }

    def side(share: float) -> float:
        journal = pretrain(root, settings, share)
        return statistics.mean(line["staleness_steps"] for line in journal if line["step"] >= STALE_EVERY)

    turns = against.interleave([lambda share=share: side(share) for share in arguments.shares], arguments.turns)
    return [
        Row(f"staleness, builder at {share:.0%}", f"builder at {arguments.shares[0]:.0%}", "steps", turn, turns[0])
        for share, turn in zip(arguments.shares, turns, strict=True)
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--subjects", type=int, default=100, help="of the sample corpus, 60 at least (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="of a core (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each share (%(default)s)")


if __name__ == "__main__":
    against.command(__doc__, "refresh", measure, options)
