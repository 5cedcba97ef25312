"""Ours against what people would use instead: runs the benchmarks, prints one table, writes one JSON.

    python benchmarks/against.py --peer PYTHON --out build/bench
    python benchmarks/encode.py --repeats 7

The first runs all of them, one after another, each in a process of its own, and writes OUT/results.json; --peer is for
step.py. The second runs one and writes OUT/encode.json. All of that is also `make bench` and `make bench NAME=encode`,
with options as ARGS="--repeats 7".

Both sides of a row take turns in one run (A B A B ...), so that a busy machine slows both. Shown are the medians of all
turns with the least and the most, and the ratio: the median over pairs of turns of ours divided by theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

BENCHMARKS = ("encode", "step", "search", "big_index", "lexical", "ingest", "tagging", "refresh", "shards", "growth")
BENCHMARKS += ("serve", "find", "read", "precision", "gpu")
PACKAGES = ("torch", "transformers", "tokenizers", "sentence-transformers", "faiss-cpu", "bm25s", "mlflow")
PACKAGES += ("onnxruntime", "openvino")
REPEATS = 5
OUT = Path("build/bench")


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The median with the extremes; ValueError for no values."""
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.least)} to {_short(self.most)})"


@dataclass(frozen=True)
class Goal:
    """What a ratio must reach, or with ``at_most`` must not exceed."""

    limit: float
    at_most: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a ratio is good enough; the limit itself is."""
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One comparison; ``ours`` and ``theirs`` are the turns of both sides, pair by pair, in ``unit``."""

    what: str
    against: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    goal: Goal | None = None
    note: str = ""

    @property
    def ratio(self) -> Spread | None:
        """Ours divided by theirs, pair by pair; None for a row that was not run."""
        pairs = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        return Spread.of(pairs) if pairs else None

    @property
    def verdict(self) -> str:
        """``not run``, ``met``, ``missed``, or nothing where there is no goal."""
        if self.ratio is None:
            return "not run"
        return "" if self.goal is None else "met" if self.goal.met(self.ratio.median) else "missed"

    def to_json(self) -> dict[str, Any]:
        """All turns, and what the table says of them."""
        ratio = None if self.ratio is None else asdict(self.ratio)
        return asdict(self) | {"ratio": ratio, "verdict": self.verdict}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Row:
        """The inverse of :meth:`to_json`."""
        goal = None if values["goal"] is None else Goal(**values["goal"])
        sides = {side: tuple(values[side]) for side in ("ours", "theirs")}
        return Row(**{name: values[name] for name in ("what", "against", "unit", "note")}, **sides, goal=goal)


def not_run(what: str, against: str, goal: Goal | None, reason: str) -> Row:
    """A row that names what was not measured, and why."""
    return Row(what, against, "", (), (), goal, f"not run: {reason}")


def interleave(sides: Sequence[Callable[[], float]], repeats: int) -> list[tuple[float, ...]]:
    """What each side gives in each of its turns, the sides taking turns."""
    turns = [[side() for side in sides] for _ in range(repeats)]
    return list(zip(*turns, strict=True))


def processor_seconds(call: Callable[[], object]) -> float:
    """Processor seconds of this process, which other processes on the machine do not lengthen much."""
    start = time.process_time()
    call()
    return time.process_time() - start


@dataclass
class GemmRate:
    """GFLOP/s of one core at its fastest matrix product, in a torch precision; call it for a turn."""

    dtype: Any
    size: int = 1536
    operands: list[Any] = field(default_factory=list)

    def __call__(self) -> float:
        """The best of five products."""
        import torch

        if not self.operands:
            self.operands = [torch.randn(self.size, self.size).to(self.dtype) for _ in range(2)]
        a, b = self.operands
        return max(2 * self.size**3 / processor_seconds(lambda: a @ b) / 1e9 for _ in range(5))


def one_thread() -> None:
    """Let torch and tokenizers of this process, and its children, work on one thread."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)


def quiet_transformers() -> None:
    """No progress bars and no remarks of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def table(named: Sequence[tuple[str, Row]]) -> str:
    """Rows with their benchmark's name as Markdown; notes below."""
    lines = ["| benchmark | what | ours | against | theirs | ratio | goal | |", "|" + "---|" * 8]
    notes = []
    for name, row in named:
        ours, theirs = (f"{Spread.of(side)} {row.unit}" if side else "" for side in (row.ours, row.theirs))
        ratio, goal = row.ratio or "", row.goal or ""
        lines.append(f"| {name} | {row.what} | {ours} | {row.against} | {theirs} | {ratio} | {goal} | {row.verdict} |")
        if row.note:
            notes.append(f"{name}, {row.what}: {row.note}")
    return "\n".join([*lines, "", *notes])


def command(
    description: str,
    name: str,
    measure: Callable[[argparse.Namespace], list[Row]],
    options: Callable[[argparse.ArgumentParser], object] | None = None,
) -> None:
    """The command line of one benchmark: measure, print the table, write OUT/NAME.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each side (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of NAME.json (%(default)s)")
    if options is not None:
        options(parser)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be 1 or more")
    begun = machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = measure(arguments)
    print(table([(name, row) for row in rows]))
    write(arguments.out / f"{name}.json", {"machine": begun, "rows": [row.to_json() for row in rows]})


def machine() -> dict[str, Any]:
    """What the figures depend on; the load is that of the moment."""
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {
        "processor": model.partition(":")[2].strip() or model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": dict(filter(None, map(_version, PACKAGES))),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON into a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Run all, print one table, write one JSON; the exit code is 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each side (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--peer", help="a Python with transformers 4.35.2 and torch, for step.py")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    named: list[tuple[str, Row]] = []
    begun = machine()
    for name in BENCHMARKS:
        words = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        words += ["--repeats", str(arguments.repeats), "--out", str(arguments.out)]
        words += ["--peer", arguments.peer] if name == "step" and arguments.peer else []
        print(f"\n{name}", flush=True)
        start = time.perf_counter()
        code = subprocess.run(words).returncode
        seconds = time.perf_counter() - start
        rows = [not_run("all of it", "", None, f"exit code {code}; the reason stands above")]
        if not code:
            rows = [Row.from_json(row) for row in json.loads((arguments.out / f"{name}.json").read_text())["rows"]]
        named += [(name, row) for row in rows]
        found.append({"benchmark": name, "seconds": seconds, "exit": code, "rows": [row.to_json() for row in rows]})
    print(f"\n{table(named)}")
    write(arguments.out / "results.json", {"machine": begun, "benchmarks": found})
    print(f"\n{arguments.out / 'results.json'}")
    sys.exit(any(benchmark["exit"] for benchmark in found))


def _version(package: str) -> tuple[str, str] | None:
    try:
        return package, metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


def _short(value: float) -> str:
    """Three significant digits, five for what is next to 1."""
    return f"{value:.5f}" if 0.99 < value < 1 else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
