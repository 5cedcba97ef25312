"""What a stage's run is in MLflow: its key, tags and data sets, the files to look at, its headline figures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.artifacts import WORK
from realmops.evaluate.predictions import PREDICTIONS, read_predictions
from realmops.evaluate.retrieval import zero_shot_recall
from realmops.journal import Journal
from realmops.tracking.mlflow_views import as_table
from realmops.tracking.run import TrackedDataset, TrackedRun, provenance_tags
from realmops.tracking.tracker import Tracker

ROWS_SHOWN = 1000  # of predictions as a table in MLflow; its UI loads all of them
UNTRACKED = ("sample", "snapshot", "tag")  # too short to wait for MLflow


def tracking_folder(root: Path) -> Path:
    """Where the local MLflow database and unsent metrics of the runs under ``root`` lie."""
    return root / WORK / "mlflow"


def tracked(
    stack: ExitStack,
    journal: Journal,
    name: str,
    values: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Path],
    project: Path,
    root: Path,
) -> Tracker | None:
    """The tracker of a stage's run, begun; None where nothing is tracked."""
    options = values["tracking"]
    if not options["enabled"] or name in UNTRACKED:
        return None
    corpus = inputs.get("snapshot")
    corpus_hash = artifacts.read_json(corpus / "corpus" / artifacts.MANIFEST)["corpus_hash"] if corpus else ""
    params_hash = artifacts.digest_of({k: v for k, v in values.items() if k != "tracking"})
    tags = provenance_tags(project, corpus_hash=corpus_hash, params_hash=params_hash)
    run_key = artifacts.digest_of([params_hash, corpus_hash, tags.get("realmops.git_commit"), str(root.absolute())])
    variant, seed = variant_of(values["finetune"]), values["run"]["seed"]
    tags |= {"realmops.kind": "run", "realmops.variant": variant, "realmops.seed": str(seed)}
    run = TrackedRun(
        run_key,
        values,
        tags,
        experiment=options["experiment"],
        datasets=datasets(values, corpus_hash, inputs),
        else_named=run_name(variant, seed, corpus_hash),
    )
    return stack.enter_context(Tracker(journal.path, name, run, tracking_folder(root)))


def variant_of(finetune: Mapping[str, Any]) -> str:
    """What a run that is no ablation is called: ``realm``, or the retriever and the reader that it starts from."""
    retriever, reader = finetune["retriever"], finetune["reader"]
    return "realm" if retriever == reader == "pretrain" else f"{retriever}+{reader}"


def run_name(variant: str, seed: int, corpus_hash: str) -> str:
    """What MLflow calls a run: variant, seed, and as much of the corpus's digest as its column of data sets shows."""
    return " ".join([f"{variant} seed {seed}", *([f"corpus {corpus_hash[:8]}"] if corpus_hash else [])])


def datasets(
    values: Mapping[str, Mapping[str, Any]], corpus_hash: str, inputs: Mapping[str, Path]
) -> list[TrackedDataset]:
    """What a stage with these inputs has read, under the names that MLflow shows: the corpus and question sets."""
    found = [TrackedDataset("corpus", corpus_hash, values["snapshot"]["documents"], "corpus")] if corpus_hash else []
    for split, context in (("train", "training"), ("dev", "validation"), ("test", "test")):
        if path := inputs.get(f"questions.{split}"):
            digest = artifacts.sha256_file(path)
            found.append(TrackedDataset(f"questions.{split}", digest, values["questions"][split], context))
    return found


def shown_files(name: str, folder: Path) -> dict[str, Path | bytes]:
    """What a stage left in its folder for people to look at in MLflow: of ``evaluate`` report and predictions."""
    if name != "evaluate":
        return {}
    rows = [prediction.shown_row() for prediction in read_predictions(folder / PREDICTIONS)[:ROWS_SHOWN]]
    found = {file: folder / file for file in (PREDICTIONS, "report.html")}
    return {**found, "predictions.table.json": as_table(rows)}


def headline(name: str, metrics: Mapping[str, Any], retriever: str = "") -> dict[str, Any]:
    """The figures that people compare runs by, under their plain names.

    With ``retriever``, the one that fine-tuning starts from, also its recall@5 before that, of the stage ``evaluate``.
    """
    names = {
        "evaluate": ("em", "f1", "recall_at_5", "ece", "precision_at_30"),
        "pretrain": ("index_staleness_steps", "retrieval_utility", "p_null"),
    }
    found = {key: metrics[key] for key in names.get(name, ()) if key in metrics}
    if name == "evaluate" and retriever and (recall := zero_shot_recall(metrics, retriever)) is not None:
        found["zero_shot_recall_at_5"] = recall
    return found
