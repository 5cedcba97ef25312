"""Seconds of the commands that people wait for: realmops --help, search and ask, each a new process.

    python benchmarks/first_second.py RUN
    python benchmarks/first_second.py RUN --peer PYTHON

RUN is the folder of a fine-tuned run. Files are in the page cache, as each command runs once before. PYTHON is that of
an environment with another version of realmops, whose commands take turns with ours. Writes OUT/first_second.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

GOALS = {"--help": 0.3, "search": 2.0, "ask": 4.0}
QUESTION = "Where is the museum?"


def seconds(python: str, command: str, run: Path) -> float:
    """Seconds of one command, from the start of its process to its end."""
    words = [command] if command == "--help" else [command, QUESTION, "--root", str(run)]
    start = time.perf_counter()
    subprocess.run([python, "-m", "realmops", *words], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Time the commands in turn, print the medians with the least and the most, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    pythons = {"ours": sys.executable} | ({"peer": arguments.peer} if arguments.peer else {})
    times = {command: {name: [] for name in pythons} for command in GOALS}
    for turn in range(arguments.repeats + 1):
        for command, columns in times.items():
            for name, python in pythons.items():
                taken = seconds(python, command, arguments.run)
                if turn:
                    columns[name].append(taken)
    print(f"| command | {' | '.join(f'{name} s' for name in pythons)} | goal s |\n|---{'|---' * (len(pythons) + 1)}|")
    for command, columns in times.items():
        cells = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in columns.values()]
        print(f"| {command} | {' | '.join(cells)} | {GOALS[command]} |")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "first_second.json").write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
