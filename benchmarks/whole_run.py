"""The whole chain on the sample corpus: seconds and peak memory per stage, against one core's matrix product.

    python benchmarks/whole_run.py --repeats 3 --out runs/whole

Each repeat runs every stage in an empty folder, as `make run` does. The machine's speed is given by a fixed
fp32 matrix product timed before and after, so that figures of two machines can be compared. Writes OUT/whole.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STAGES = ("sample", "snapshot", "tag", "ict", "pretrain", "finetune", "evaluate")


def product_rate() -> float:
    """GFLOP/s of one core at a product of 2048 x 2048 matrices, the best of five."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(2048, 2048)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * 2048**3 / (time.perf_counter() - start) / 1e9)
    return best


def measure(stage: str, root: Path, log: Path, options: Sequence[str] = ()) -> dict[str, float]:
    """Wall and CPU seconds (children included) and the largest process's memory in MiB of one stage.

    ``options`` are those of ``realmops run``.
    """
    command = [sys.executable, "-m", "realmops", "run", stage, "--root", str(root)]
    with open(log, "ab") as file:
        start = time.perf_counter()
        child = subprocess.Popen([*command, *options], stdout=file, stderr=file)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{stage} failed with exit code {child.returncode}; see {log}")
    seconds = time.perf_counter() - start
    return {"wall": seconds, "cpu": usage.ru_utime + usage.ru_stime, "mib": usage.ru_maxrss / 1024}


def main() -> None:
    """Run the repeats, print the medians, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/whole"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        root = arguments.out / f"root-{repeat}"
        shutil.rmtree(root, ignore_errors=True)
        before = product_rate()
        stages = {stage: measure(stage, root, arguments.out / "log.txt") for stage in STAGES}
        runs.append({"gflops": [before, product_rate()], "stages": stages})
    print("| stage | wall s | CPU s | MiB |\n|---|---|---|---|")
    for stage in STAGES:
        wall, cpu, mib = (statistics.median(r["stages"][stage][k] for r in runs) for k in ("wall", "cpu", "mib"))
        print(f"| {stage} | {wall:.1f} | {cpu:.1f} | {mib:.0f} |")
    whole = [sum(s["wall"] for s in r["stages"].values()) for r in runs]
    rates = [rate for r in runs for rate in r["gflops"]]
    median = statistics.median(whole)
    print(f"\nwhole run: median {median:.0f} s, {min(whole):.0f} to {max(whole):.0f} s in {len(runs)} runs")
    print(f"matrix product: {min(rates):.0f} to {max(rates):.0f} GFLOP/s on one core")
    (arguments.out / "whole.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
