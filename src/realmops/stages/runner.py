"""Run one stage whole: inputs checked, work resumed, output and metrics committed together."""

import fcntl
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.artifacts import WORK
from realmops.config import CLOSED_BOOK, Values
from realmops.corpus.cloze import KIND
from realmops.hub import T5, encoder_files
from realmops.journal import Journal
from realmops.stages import (
    CORPUS,
    JOURNAL,
    METRICS,
    STAGES,
    Job,
    Report,
    Silent,
    Stage,
    deciding,
    external_files,
    fingerprint,
    parse_sections,
    reads_spans,
)
from realmops.tracking.runs import headline, shown_files, tracked

TRAINS_NOTHING = ("sample", "snapshot", "evaluate")


def run_stage(
    name: str,
    values: Values,
    *,
    presets: Sequence[str] = (),
    project: Path,
    root: Path,
    report: Report,
    force: bool = False,
) -> dict[str, Any]:
    """Run a stage on the folders under ``root``; returns its metrics.

    Args:
        values: all sections of the params file.
        presets: names of those that the values come from, for the record.
        project: where relative file names of the params start.
        root: where the stages' folders lie (data/, models/, results/).
        force: run again even when the output was made from the same inputs and options.

    The output folder is replaced when the stage has succeeded, and only then.  A killed stage goes on from
    its checkpoints when it is run again with the same options and inputs.  Where torchrun has started several
    processes, the first one runs the stage and the others help it to train.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from realmops.devices import resolve_device
        from realmops.train.parallel import join, team

        join(resolve_device(values["run"]["device"]))
        team().wait()  # what the stage reads is there
        if not team().leads:
            return _help(STAGES[name], values, project, root, force)
    with alone(root / WORK, name):
        return _run_alone(STAGES[name], values, presets, project, root, report, force)


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Refuse to run a stage beside itself, as beside one whose ``dvc`` was killed: both would write one journal."""
    artifacts.make_folder(folder)
    with open(folder / f"{name}.lock", "ab") as file:
        if artifacts.try_lock(file) is False:
            raise ValueError(
                f"{file.name} is held: another process runs the stage {name} there; wait for it or end it, then run "
                "the same command again"
            )
        yield


def offer_of(root: Path, name: str) -> Path:
    """The file by which a stage offers shards of its work to index builders that follow it."""
    return root / WORK / f"{name}.shards.json"


def is_running(folder: Path, name: str) -> bool:
    """Whether a process holds the lock of a stage, looked at without making one."""
    with suppress(OSError), open(folder / f"{name}.lock", "rb") as file:
        return artifacts.try_lock(file, fcntl.LOCK_SH) is False
    return False  # never run


def _run_alone(
    stage: Stage,
    values: Values,
    presets: Sequence[str],
    project: Path,
    root: Path,
    report: Report,
    force: bool,
) -> dict[str, Any]:
    name = stage.name
    sections = parse_sections(stage, values)
    inputs = inputs_of(stage, values, project, root)
    key = fingerprint(stage, values, inputs)
    final = root / stage.folder
    work = root / WORK / "work" / f"{name}-{key[:16]}"
    if not force and (done := finished(final, stage, key)) is not None:
        shutil.rmtree(work, ignore_errors=True)  # of a process killed as it ended
        report.say(f"{name}: nothing to do, {final} was made from the same inputs and options")
        return done
    if force:
        shutil.rmtree(work, ignore_errors=True)
    artifacts.make_folder(work)
    started = time.monotonic()
    with ExitStack() as stack:
        stack.callback(_remove_empty, work)
        out = stack.enter_context(artifacts.atomic_folder(final))
        journal = stack.enter_context(Journal(work / JOURNAL, name))
        tracker = tracked(stack, journal, name, values, presets, inputs, project, root)
        job = Job(sections, inputs, out, work, journal, report, offer_of(root, name), presets)
        metrics = _finite(_worked(stage, values, job))
        metrics["seconds"] = round(time.monotonic() - started, 1)
        journal.position()
        if (work / JOURNAL).stat().st_size:
            shutil.copyfile(work / JOURNAL, out / JOURNAL)
        artifacts.write_json(out / METRICS, metrics)
        made = {"sections": deciding(stage, values), "presets": [*presets]} | ({"code": code()} if code() else {})
        artifacts.write_manifest(out, name, fingerprint=key, **made)
        if tracker is not None:
            figures = {f"final/{name}.{key}": value for key, value in metrics.items()}
            tuned = values["finetune"]
            figures |= headline(name, metrics, "" if tuned["reader"] in CLOSED_BOOK else tuned["retriever"])
            tracker.finish(figures, shown_files(name, out))
    shutil.rmtree(work, ignore_errors=True)
    return metrics


def code() -> str:
    """The commit of the image that this runs in; empty where it is not known."""
    return os.environ.get("REALMOPS_COMMIT", "")


def _help(stage: Stage, values: Values, project: Path, root: Path, force: bool) -> dict[str, Any]:
    """Take part in the training of a stage that another process leads: say nothing, and keep nothing of it."""
    if stage.name in TRAINS_NOTHING:
        return {}
    sections, inputs = parse_sections(stage, values), inputs_of(stage, values, project, root)
    if not force and finished(root / stage.folder, stage, fingerprint(stage, values, inputs)) is not None:
        return {}
    with (
        tempfile.TemporaryDirectory(prefix="realmops-") as folder,
        Journal(Path(folder) / JOURNAL, stage.name) as journal,
    ):
        place = Path(folder)
        _worked(stage, values, Job(sections, inputs, place, place, journal, Silent(), place / "offer"))
    return {}


def _worked(stage: Stage, values: Values, job: Job) -> dict[str, Any]:
    if "run" in stage.sections:
        from realmops.devices import tune_process

        tune_process(values["run"]["threads"])
    return stage.run(job)


def inputs_of(stage: Stage, values: Values, project: Path, root: Path) -> dict[str, Path]:
    """What a stage reads: folders of earlier stages, files that its options name, files of the encoder."""
    inputs: dict[str, Path] = {}
    for need in stage.needs:
        folder = root / STAGES[need].folder
        missing = need in stage.optional and not folder.exists()
        if missing or (need == "tag" and not reads_spans(values)):
            continue
        artifacts.read_manifest(folder, need)
        inputs[need] = folder
    inputs |= external_files(stage, values, project, root)
    _check_made_questions(inputs)
    if "bert" in stage.sections:  # other weights under the same name are another encoder
        inputs |= {f"bert.init/{name}": path for name, path in encoder_files(values["bert"]["init"]).items()}
    if "closed_book" in stage.sections and values["finetune"]["reader"] in CLOSED_BOOK:
        found = encoder_files(values["closed_book"]["init"], T5)
        inputs |= {f"closed_book.init/{name}": path for name, path in found.items()}
    return inputs


def _check_made_questions(inputs: Mapping[str, Path]) -> None:
    """ValueError for questions that ``realmops cloze`` made from another corpus than that of the snapshot."""
    for key, path in inputs.items():
        if not key.startswith("questions.") or not (path.parent / artifacts.MANIFEST).is_file():
            continue
        try:
            manifest = artifacts.read_json(path.parent / artifacts.MANIFEST)
        except ValueError:
            continue  # a user's own file of that name
        made_from = manifest.get("corpus_hash") if isinstance(manifest, dict) and manifest.get("kind") == KIND else None
        corpus_hash = artifacts.read_json(inputs["snapshot"] / CORPUS / artifacts.MANIFEST)["corpus_hash"]
        if made_from not in (None, corpus_hash):
            raise ValueError(
                f"{key} is {path}, made from corpus {made_from[:12]}; the snapshot is corpus {corpus_hash[:12]}: run "
                "'realmops cloze' with the same options"
            )


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics without those that have no value, as the loss of no step."""
    return {name: v for name, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}


def _remove_empty(work: Path) -> None:
    """Leave no work folder of a stage that ended before there was anything to go on from."""
    if not any(path.stat().st_size for path in work.rglob("*") if path.is_file()):
        shutil.rmtree(work, ignore_errors=True)


def finished(final: Path, stage: Stage, key: str) -> dict[str, Any] | None:
    """The metrics of a stage whose output lies in ``final`` and has this fingerprint; None where it does not."""
    if not (final / artifacts.MANIFEST).is_file():
        return None
    try:
        manifest = artifacts.read_manifest(final, stage.name)
    except ValueError:
        return None  # damaged: make it again
    return artifacts.read_json(final / METRICS) if manifest.get("fingerprint") == key else None
