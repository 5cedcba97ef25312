"""REALM against ORQA over seeds: each seed its own world and its own training, through the command line.

    python benchmarks/seeds.py --seeds 5 --jobs 2 --out runs/seeds

Writes OUT/seeds.md and OUT/seeds.json beside what ``realmops ablate`` writes.  ORQA is the same retriever and reader
fine-tuned without REALM pre-training; both are evaluated on the same test questions.  A second call goes on where the
first stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realmops.commands.ablate import Ablation, ablate, run_folder
from realmops.console import Console
from realmops.evaluate.compare import correct_mask, read_paired
from realmops.evaluate.exact_match import interval_over_seeds


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
        "correct": [correct_mask(run).tolist() for run in read_paired(realm, orqa)],
    }


def difference(what: str, by_seed: Sequence[npt.NDArray[np.float64]], *, shared: bool) -> str:
    """The mean difference in words, with its interval over seeds and questions: ``shared`` ones, or of each its own."""
    found = interval_over_seeds(by_seed, shared=shared, seed=0)
    questions = len(by_seed[0]) if shared else sum(map(len, by_seed))
    return (
        f"{what}: {found.mean:+.3f}, 95 % interval {found.low:+.3f} to {found.high:+.3f} (paired by seed and "
        f"question, {len(by_seed)} seeds and their {questions} questions)."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown with one row per seed, the means, and the paired interval over seeds and questions."""
    names = [name for name in rows[0] if name not in ("seed", "correct")]
    lines = ["| seed | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for row in rows:
        lines.append(f"| {row['seed']} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")
    lines.append("| mean | " + " | ".join(f"{np.mean([r[n] for r in rows]):.3f}" for n in names) + " |")
    em_differences = [np.subtract(*np.array(row["correct"], float)) for row in rows]
    rises = [r["recall_after"] - r["recall_before"] for r in rows]
    recall = interval_over_seeds([[rise] for rise in rises], shared=False, seed=0)
    spread = f", 95 % interval {recall.low:+.3f} to {recall.high:+.3f} (over seeds)" if len(rows) > 1 else ""
    lines += [
        "",
        difference("EM, REALM minus ORQA", em_differences, shared=False),
        f"Zero-shot recall@5, after minus before REALM: {recall.mean:+.3f}{spread}; it rose in "
        f"{sum(rise > 0 for rise in rises)} and masked hit@5 in "
        f"{sum(r['hit_after'] > r['hit_before'] for r in rows)} of {len(rows)} seeds.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="stages side by side; one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    settings = [*arguments.settings, "tracking.enabled=false"]
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    what = Ablation(Path("params.yaml"), (), settings, ("realm", "baseline"), seeds, arguments.out)
    _, failures = ablate(what, jobs=arguments.jobs, report=Console())
    if failures:
        sys.exit("\n".join(failures))
    rows = [collect(seed, *(run_folder(arguments.out, name, seed) for name in ("realm", "baseline"))) for seed in seeds]
    text = table(rows)
    (arguments.out / "seeds.md").write_text(text)
    public = [{k: v for k, v in row.items() if k != "correct"} for row in rows]
    (arguments.out / "seeds.json").write_text(json.dumps(public, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
