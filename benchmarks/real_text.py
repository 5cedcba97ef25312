"""What each part of the training is worth on real text: one table of variants over seeds, through the command line.

    realmops public-data squad ner    # the files that the preset squad names, into data/public
    python benchmarks/real_text.py --preset squad --seeds 3 --out runs/real_text

``untouched`` is the encoder as it came, ``warmed`` has the inverse cloze task behind it, ``realm`` is the run as params
and presets have it, ``control`` has the inverse cloze task alone for as many steps as realm has of both, ``orqa`` is
realm's warm start fine-tuned without its pre-training. All are fine-tuned and evaluated. What variants share is trained
once, and a second call goes on where the first stopped. Writes OUT/real_text.md and OUT/real_text.json.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from against import machine, write
from seeds import difference
from whole_run import measure

from realmops import config
from realmops.commands.ablate import is_complete, replace_symlink, run_folder
from realmops.evaluate.predictions import FIRST_HITS, read_results
from realmops.stages import STAGES, fingerprint
from realmops.stages.runner import stage_inputs

CHANGES: Mapping[str, tuple[str, ...]] = {
    "untouched": ("ict.steps=0", "pretrain.steps=0"),
    "warmed": ("pretrain.steps=0",),
    "control": ("pretrain.steps=0",),  # and more steps of ict
    "realm": (),
    "orqa": ("finetune.retriever=ict", "finetune.reader=ict"),
}
# Of each row: whose metrics, what they call its retriever before fine-tuning, and its answers.
ROWS = {name: (name, "before_realm_" if name == "orqa" else "zero_shot_", "") for name in CHANGES}
ROWS |= {"BM25 and realm's reader": ("realm", "bm25_", "bm25_"), "rule without learning": ("realm", "rule_", "rule_")}
COLUMNS = {
    **{f"zero-shot recall@{k}": f"{{start}}recall_at_{k}_{{rule}}" for k in (1, 5, 20)},
    "with words @5": "{start}hybrid_recall_at_5_{rule}",
    "fine-tuned recall@5": "{answers}recall_at_5",
    "EM": "{answers}em",
    "F1": "{answers}f1",
}
COST = "cost.json"  # beside a stage's folder: what its process took; of a killed one only what came after
Figures = dict[str, float]
RUNS_ONE: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)  # of each stage's folder, for --at-once


def run_all(params: Path, presets: Sequence[Path], settings: Sequence[str], view: Path) -> dict[str, Figures]:
    """Run the stages of one variant that are not done, each in a folder named by its fingerprint; what all cost."""
    values = config.load_params(params, presets=presets, settings=settings)
    options = ["--params", str(params), *(word for path in presets for word in ("--preset", str(path)))]
    options += [word for setting in settings for word in ("--set", setting)]
    costs = {}
    for stage in STAGES.values():
        key = fingerprint(stage, values, stage_inputs(stage, values, params.parent, view))
        home = view.parents[1] / "store" / f"{stage.name}-{key[:16]}"
        with RUNS_ONE[home]:
            if not is_complete(home, stage):
                home.mkdir(parents=True, exist_ok=True)
                for need in stage.needs:
                    if (view / STAGES[need].folder).exists():
                        replace_symlink((view / STAGES[need].folder).resolve(), home / STAGES[need].folder)
                print(f"{view}: {stage.name}", flush=True)
                write(home / COST, measure(stage.name, home, home / "log.txt", options))
        replace_symlink(home / stage.folder, view / stage.folder)
        costs[stage.name] = json.loads((home / COST).read_text()) if (home / COST).is_file() else {}
    return costs


def figures_of(view: Path, start: str, answers: str) -> Figures:
    """The columns of a row, from one seed's metrics; those that are there."""
    found = json.loads((view / "results/metrics.json").read_text())
    [rule] = [
        n[len("recall_at_5_") : -len("_low")] for n in found if n.startswith("recall_at_5_") and n.endswith("_low")
    ]
    names = {column: name.format(start=start, rule=rule, answers=answers) for column, name in COLUMNS.items()}
    return {column: found[name] for column, name in names.items() if name in found}


def values_of(view: Path, name: str) -> npt.NDArray[np.float64] | None:
    """Of each question ``em`` or ``f1``, or whether five passages have an answer by a column of the first hits."""
    if name in ("em", "f1"):
        return np.array([getattr(prediction, name) for prediction in read_results(view)], np.float64)
    table = pq.read_table(view / "results" / FIRST_HITS)
    if name not in table.column_names:
        return None
    ranks: npt.NDArray[np.int32] = table.column(name).to_numpy()
    return ((ranks >= 0) & (ranks < 5)).astype(np.float64)


def differences(out: Path, seeds: Sequence[int]) -> list[str]:
    """REALM minus the control in words, with intervals over seeds and questions."""
    words = {"Zero-shot recall@5": "zero_shot_first_hit", "The same with words": "zero_shot_hybrid_first_hit"}
    found = []
    for what, name in {**words, "EM": "em", "F1": "f1"}.items():
        both = [[values_of(run_folder(out, one, seed), name) for seed in seeds] for one in ("realm", "control")]
        if any(values is None for side in both for values in side):
            continue  # no hybrid
        ours_SQ, theirs_SQ = np.array(both)
        found.append(difference(f"{what}, realm minus control", list(ours_SQ - theirs_SQ), shared=True))
    return found


def markdown(head: str, columns: Sequence[str], rows: Mapping[str, Sequence[Figures]], digits: int) -> str:
    """A table of means over seeds; what a row does not have stays empty."""
    lines = ["", f"| {head} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for name, seeds in rows.items():
        known = [[figures[column] for figures in seeds if column in figures] for column in columns]
        lines.append(f"| {name} | {' | '.join(f'{np.mean(cell):.{digits}f}' if cell else '' for cell in known)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--preset", action="append", default=[], help="as of realmops run; can be repeated")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=CHANGES, default=list(CHANGES), help="without it all")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="variants that run side by side")
    parser.add_argument("--control-ict-steps", type=int, metavar="N", help="without it those of ict and of pretrain")
    parser.add_argument("--out", type=Path, default=Path("runs/real_text"))
    arguments = parser.parse_args()
    out, seeds, begun = arguments.out, range(arguments.seeds), machine()
    presets = [config.preset_path(name, arguments.params) for name in arguments.preset]
    values = config.load_params(arguments.params, presets=presets, settings=arguments.settings)
    steps = arguments.control_ict_steps or values.ict.steps + values.pretrain.steps

    def run_one(seed: int, name: str) -> dict[str, Figures]:
        longer = [f"ict.steps={steps}", "ict.epochs=0"] if name == "control" else []
        settings = [*arguments.settings, *CHANGES[name], *longer]
        settings += [f"run.seed={seed}", "tracking.enabled=false"]
        return run_all(arguments.params, presets, settings, run_folder(out, name, seed))

    variants = arguments.variants
    pairs = list(product(seeds, variants))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        mapped = map if arguments.at_once == 1 else pool.map
        spent = list(mapped(run_one, *zip(*pairs, strict=True)))
    costs = {name: [cost for (_, one), cost in zip(pairs, spent, strict=True) if one == name] for name in variants}
    rows = {
        name: [figures_of(run_folder(out, row[0], seed), *row[1:]) for seed in seeds]
        for name, row in ROWS.items()
        if row[0] in variants
    }
    both = differences(out, seeds) if {"realm", "control"} <= set(variants) else []
    text = "\n".join([markdown(f"means of {len(seeds)} seeds", list(COLUMNS), rows, 3), *both])
    for head, unit in (("seconds", "wall"), ("MiB at most", "mib")):
        of_stage = {s: [{n: c[s][unit]} for n in variants for c in costs[n] if unit in c[s]] for s in STAGES}
        text += "\n" + markdown(head, variants, of_stage, 0)
    (out / "real_text.md").write_text(text)
    write(out / "real_text.json", {"machine": begun, "control_ict_steps": steps, "rows": rows, "costs": costs})
    print(text)


if __name__ == "__main__":
    main()
