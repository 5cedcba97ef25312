"""REALM against ORQA over seeds: each seed its own world and its own training, through the command line.

    python benchmarks/seeds.py --seeds 5 --jobs 2 --out runs/seeds

Writes OUT/table.md and OUT/table.json.  ORQA is the same retriever and reader fine-tuned without REALM
pre-training; both are evaluated on the same test questions.  A second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from realmops.evaluate.compare import correct, read_paired
from realmops.evaluate.openqa import bootstrap_interval, paired_bootstrap

SHARED = ("data", "models/ict", "models/pretrain")


def run(arguments: list[str], log: Path) -> None:
    """One call of the command line; its output goes to a log file."""
    with open(log, "ab") as file:
        subprocess.run([sys.executable, "-m", "realmops", *arguments], check=True, stdout=file, stderr=file)


def one_seed(seed: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """Run both variants of one seed; REALM's stages are shared by links."""
    options = [f"--set=run.seed={seed}", f"--set=sample.seed={seed}", "--set=tracking.enabled=false", *extra]
    realm, orqa = out / f"seed-{seed}", out / f"seed-{seed}-orqa"
    (orqa / "models").mkdir(parents=True, exist_ok=True)
    realm.mkdir(parents=True, exist_ok=True)
    run(["run", "all", "--root", str(realm), *options], out / f"seed-{seed}.log")
    for name in SHARED:
        if not (orqa / name).is_symlink():
            (orqa / name).symlink_to((realm / name).resolve())
    baseline = ["--set=finetune.retriever=ict", "--set=finetune.reader=ict"]
    for stage in ("finetune", "evaluate"):
        run(["run", stage, "--root", str(orqa), *options, *baseline], out / f"seed-{seed}.log")
    return collect(seed, realm, orqa)


def collect(seed: int, realm: Path, orqa: Path) -> dict[str, Any]:
    """The figures of one seed."""

    def metrics(root: Path, folder: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((root / folder / "metrics.json").read_text())
        return values

    pretrain, ours, theirs = metrics(realm, "models/pretrain"), metrics(realm, "results"), metrics(orqa, "results")
    rule = "recall_at_5_token_boundary"
    stages = (
        "data/sample",
        "data/snapshot",
        "data/spans",
        "models/ict",
        "models/pretrain",
        "models/finetune",
        "results",
    )
    return {
        "seed": seed,
        "recall_before": ours[f"before_realm_{rule}"],
        "recall_after": ours[f"zero_shot_{rule}"],
        "bm25": ours[f"bm25_{rule}"],
        "hit_before": pretrain["hit_at_5_before"],
        "hit_after": pretrain["hit_at_5_after"],
        "closed_book": ours["closed_book_em"],
        "em_orqa": theirs["em"],
        "em_realm": ours["em"],
        "tuned_recall_orqa": theirs[rule],
        "tuned_recall_realm": ours[rule],
        "refreshes": pretrain["refreshes"],
        "wait_share": pretrain["wait_share"],
        "utility": pretrain["retrieval_utility"],
        "seconds": sum(metrics(realm, folder)["seconds"] for folder in stages),
        "correct": [correct(run).tolist() for run in read_paired(realm, orqa)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown with one row per seed, the means, and the paired interval over all questions."""
    names = [name for name in rows[0] if name not in ("seed", "correct")]
    lines = ["| seed | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for row in rows:
        lines.append(f"| {row['seed']} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")
    lines.append("| mean | " + " | ".join(f"{np.mean([r[n] for r in rows]):.3f}" for n in names) + " |")
    ours, theirs = (np.concatenate([np.array(r["correct"][i], dtype=float) for r in rows]) for i in (0, 1))
    questions = paired_bootstrap(ours, theirs, seed=0)
    seeds = bootstrap_interval([r["em_realm"] - r["em_orqa"] for r in rows], seed=0)
    recall = bootstrap_interval([r["recall_after"] - r["recall_before"] for r in rows], seed=0)
    lines += [
        "",
        f"EM, REALM minus ORQA: {questions.mean:+.3f}, 95 % interval {questions.low:+.3f} to {questions.high:+.3f} "
        f"(paired bootstrap over {len(ours)} questions); over seeds {seeds.low:+.3f} to {seeds.high:+.3f}.",
        f"Zero-shot recall@5, after minus before REALM: {recall.mean:+.3f}, over seeds {recall.low:+.3f} to "
        f"{recall.high:+.3f}; it rose in {sum(r['recall_after'] > r['recall_before'] for r in rows)} and masked "
        f"hit@5 in {sum(r['hit_after'] > r['hit_before'] for r in rows)} of {len(rows)} seeds.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="seeds side by side; one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    extra = [f"--set={setting}" for setting in arguments.settings]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        rows = list(pool.map(lambda seed: one_seed(seed, arguments.out, extra), seeds))
    text = table(rows)
    (arguments.out / "table.md").write_text(text)
    public = [{k: v for k, v in row.items() if k != "correct"} for row in rows]
    (arguments.out / "table.json").write_text(json.dumps(public, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
