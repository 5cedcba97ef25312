"""Run one stage: check inputs, resume work, commit output and metrics together."""

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
from realmops.artifacts import WORK_FOLDER
from realmops.hub import CONFIG, HUB, READER, T5, encoder_files
from realmops.journal import Journal
from realmops.options import Options, RunOptions
from realmops.progress import Report, SilentReport
from realmops.questions.cloze import KIND
from realmops.readers.ocr import find_data
from realmops.readers.sources import may_have_scans
from realmops.stages import (
    CORPUS,
    INIT,
    JOURNAL,
    MACHINE,
    METRICS,
    READER_INIT,
    STAGES,
    Job,
    Stage,
    fingerprint,
    fingerprint_options,
    option_files,
    reads_spans,
    resolve_models,
    stage_options,
)
from realmops.stages.option_inputs import MODELS
from realmops.stages.run_inputs import written_inputs
from realmops.tracking.runs import headline_metrics, mlflow_artifacts, start_tracking

TRAINS_NOTHING = ("sample", "snapshot", "evaluate")


def run_stage(
    name: str,
    options: Options,
    *,
    presets: Sequence[str] = (),
    project: Path,
    root: Path,
    report: Report,
    force: bool = False,
) -> dict[str, Any]:
    """Run a stage on the folders under ``root``, unless its output is up to date, and return its metrics.

    The output folder is replaced when the stage has succeeded; a killed stage resumes from its checkpoints when it is
    run again with the same options and inputs. Under torchrun, rank 0 runs the stage and the others take part in its
    training. ``presets`` are for the record; file names in ``options`` are relative to ``project``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from realmops.devices import resolve_device
        from realmops.train.parallel import join_process_group, process_group

        join_process_group(resolve_device(options.run.device))
        process_group().wait()  # for the inputs of the stage
        if not process_group().is_main_process:
            return _run_worker(STAGES[name], options, project, root, force)
    with stage_lock(root / WORK_FOLDER, name):
        return _run_locked(STAGES[name], options, presets, project, root, report, force)


@contextmanager
def stage_lock(folder: Path, name: str) -> Iterator[None]:
    """Context manager: lock a stage, so that two processes do not write one journal; ValueError if it is locked."""
    artifacts.make_folder(folder)
    with open(folder / f"{name}.lock", "ab") as file:
        if artifacts.try_lock(file) is False:
            raise ValueError(
                f"{file.name} is locked: another process runs the stage {name}; wait for it, or end it, and run again"
            )
        yield


def shard_offer_path(root: Path, name: str) -> Path:
    """Return the file in which a stage offers shards of its work to index builders."""
    return root / WORK_FOLDER / f"{name}.shards.json"


def is_running(folder: Path, name: str) -> bool:
    """Return whether a process holds the lock of a stage; the lock file is not created."""
    with suppress(OSError), open(folder / f"{name}.lock", "rb") as file:
        return artifacts.try_lock(file, fcntl.LOCK_SH) is False
    return False  # never run


def _run_locked(
    stage: Stage, options: Options, presets: Sequence[str], project: Path, root: Path, report: Report, force: bool
) -> dict[str, Any]:
    name = stage.name
    resolved = resolve_models(options, project)
    sections = stage_options(stage, resolved)
    inputs = stage_inputs(stage, options, project, root)
    key = fingerprint(stage, options, inputs)
    final = root / stage.folder
    work = root / WORK_FOLDER / "work" / f"{name}-{key[:16]}"
    existing = None if force else up_to_date_metrics(final, stage, key)
    if force or existing is not None:  # the process that committed it may have been killed after that
        shutil.rmtree(work, ignore_errors=True)
    if existing is not None:
        report.log(f"{name}: nothing to do, {final} is up to date with its inputs and options")
        return existing
    artifacts.make_folder(work)
    started = time.monotonic()
    with ExitStack() as stack:
        stack.callback(_remove_empty, work)
        out = stack.enter_context(artifacts.atomic_folder(final, name))
        journal = stack.enter_context(Journal(work / JOURNAL, name))
        written = written_inputs(options, root)  # the same for all stages of a training, wherever they read inputs
        tracker = start_tracking(stack, journal, name, written, presets, inputs, project, root)
        job = Job(sections, inputs, out, work, journal, report, shard_offer_path(root, name), presets)
        metrics = _run_tuned(stage, options, job)  # NaN is, for example, the mean loss over no steps
        metrics = {key: v for key, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}
        metrics["seconds"] = round(time.monotonic() - started, 1)
        journal.position()
        if (work / JOURNAL).stat().st_size:
            shutil.copyfile(work / JOURNAL, out / JOURNAL)
        artifacts.write_json(out / METRICS, metrics)
        origin: dict[str, Any] = {"sections": fingerprint_options(stage, options.model_dump()), "presets": [*presets]}
        if image_commit():
            origin["code"] = image_commit()
        if names := _hub_models(resolved, inputs):
            origin["hub"] = names
        if _uses_torch(stage, options):
            origin |= artifacts.read_json(work / MACHINE)
        artifacts.write_manifest(out, name, fingerprint=key, **origin)
        if tracker is not None:
            figures = {f"final/{name}.{key}": value for key, value in metrics.items()}
            tuning = options.finetune
            figures |= headline_metrics(name, metrics, tuning.retriever if tuning.reads_passages else "")
            tracker.finish(figures, mlflow_artifacts(name, out))
    shutil.rmtree(work, ignore_errors=True)
    return metrics


def _hub_models(options: Options, inputs: Mapping[str, Path]) -> dict[str, str]:
    """Return the models of the hub that a stage reads, by option, as NAME@COMMIT."""
    folders = {key: inputs[f"{key}/{CONFIG}"].parent for key in MODELS if f"{key}/{CONFIG}" in inputs}
    names = {key: options.get(key) for key in folders}
    return {key: f"{name.removeprefix(HUB)}@{folders[key].name}" for key, name in names.items() if name.startswith(HUB)}


def image_commit() -> str:
    return os.environ.get("REALMOPS_COMMIT", "")


def _run_worker(stage: Stage, options: Options, project: Path, root: Path, force: bool) -> dict[str, Any]:
    """Take part in the training of a stage that rank 0 runs, without logs and output."""
    if stage.name in TRAINS_NOTHING or not _uses_torch(stage, options):
        return {}
    sections = stage_options(stage, resolve_models(options, project))
    inputs = stage_inputs(stage, options, project, root)
    if not force and up_to_date_metrics(root / stage.folder, stage, fingerprint(stage, options, inputs)) is not None:
        return {}
    with (
        tempfile.TemporaryDirectory(prefix="realmops-") as folder,
        Journal(Path(folder, JOURNAL), stage.name) as journal,
    ):
        place = Path(folder)
        _run_tuned(stage, options, Job(sections, inputs, place, place, journal, SilentReport(), place / "offer"))
    return {}


def _run_tuned(stage: Stage, options: Options, job: Job) -> dict[str, Any]:
    """Run a stage with its threads and random state, so that it computes the same after others in one process."""
    if not _uses_torch(stage, options):
        return stage.run(job)
    import torch

    from realmops.process import configure_process, release_memory

    machine = _machine(options, job.work)
    if stage.name not in TRAINS_NOTHING:
        machine = _share(machine)
        artifacts.write_json(job.work / MACHINE, machine)
        decided = {name: machine[name] for name in ("device", "precision")}
        job.sections["run"] = job.section(RunOptions).model_copy(update=decided)
    configure_process(machine["threads"])
    torch.manual_seed(artifacts.seed_for(options.run.seed, stage.name))
    try:
        return stage.run(job)
    finally:
        release_memory()


def _machine(options: Options, work: Path) -> dict[str, Any]:
    """Return device, precision and threads of a stage; a resumed one keeps those that it began with.

    Raises:
        ValueError: it began on a GPU, and this machine has none.
    """
    import torch

    from realmops.devices import precision_rule, resolve_device
    from realmops.process import resolve_threads

    path, run = work / MACHINE, options.run
    if not path.is_file():
        device = resolve_device(run.device)
        width = options.bert.width if options.retriever.init == "small" else math.inf
        precision, threads = precision_rule(run.precision, device), resolve_threads(run.threads, width)
        artifacts.write_json(path, {"device": device.type, "precision": precision, "threads": threads})
    kept: dict[str, Any] = artifacts.read_json(path)
    if kept["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{path}: the stage began on a GPU, and torch finds none here: run it again on a machine with a GPU, or "
            "from the beginning with --force"
        )
    return kept


def _share(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the first process's decisions in all processes of a training."""
    import torch

    from realmops.devices import BF16_IF_WIDE, DTYPES
    from realmops.search.approximate import TYPES
    from realmops.train import parallel

    keys, values = ("device", "precision", "index_type"), ("", "cpu", "cuda", *DTYPES, BF16_IF_WIDE, "exact", *TYPES)
    numbers = [*(values.index(machine.get(key, "")) for key in keys), machine["threads"]]
    *chosen, threads = map(int, parallel.process_group().broadcast_numbers(numbers, torch.device("cpu")))
    return {key: values[n] for key, n in zip(keys, chosen, strict=True) if n} | {"threads": threads}


def _uses_torch(stage: Stage, options: Options) -> bool:
    """Return whether a stage computes with torch, which takes seconds to import; salient spans by rules need none."""
    return "run" in stage.sections and (stage.name != "tag" or options.tag.method not in ("given", "phrases"))


def stage_inputs(stage: Stage, options: Options, project: Path, root: Path) -> dict[str, Path]:
    """Return the inputs of a stage: earlier stages, files that its options name, tesseract's data, the encoder."""
    inputs: dict[str, Path] = {}
    for need in stage.needs:
        folder = root / STAGES[need].folder
        missing = need in stage.optional and not folder.exists()
        if missing or (need == "tag" and not reads_spans(options)):
            continue
        artifacts.read_manifest(folder, need)
        inputs[need] = folder
    inputs |= option_files(stage, options, project, root)
    _check_generated_questions(inputs)
    if stage.name == "snapshot" and any(map(may_have_scans, inputs.values())):
        inputs |= {f"snapshot.ocr/{Path(file).stem}": Path(file) for file in find_data(options.snapshot.ocr)}
    options = resolve_models(options, project)
    if stage.reads(INIT):  # the weights under one name may change
        inputs |= {f"{INIT}/{name}": path for name, path in encoder_files(options.retriever.init).items()}
    if stage.reads(READER_INIT) and options.reader.is_published:
        inputs |= {f"{READER_INIT}/{name}": path for name, path in encoder_files(options.reader.init, READER).items()}
    if "closed_book" in stage.sections and not options.finetune.reads_passages:
        files = encoder_files(options.closed_book.init, T5)
        inputs |= {f"closed_book.init/{name}": path for name, path in files.items()}
    return inputs


def _check_generated_questions(inputs: Mapping[str, Path]) -> None:
    """Raise ValueError for questions that ``realmops run cloze`` generated from another corpus than the snapshot."""
    for key, path in inputs.items():
        if not key.startswith("questions.") or not (path.parent / artifacts.MANIFEST).is_file():
            continue
        try:
            manifest = artifacts.read_json(path.parent / artifacts.MANIFEST)
        except ValueError:
            continue  # a file of the user with that name
        is_generated = isinstance(manifest, dict) and manifest.get("kind") == KIND
        source_hash = manifest.get("corpus_hash") if is_generated else None
        corpus_hash = artifacts.read_json(inputs["snapshot"] / CORPUS / artifacts.MANIFEST)["corpus_hash"]
        if source_hash not in (None, corpus_hash):
            raise ValueError(
                f"{key} is {path}, generated from corpus {source_hash[:12]}, but the snapshot is corpus "
                f"{corpus_hash[:12]}; run 'realmops run cloze' with the same options"
            )


def _remove_empty(work: Path) -> None:
    """Remove the work folder of a stage that ended before it wrote anything to resume from."""
    if not any(path.stat().st_size for path in work.rglob("*") if path.is_file() and path.name != MACHINE):
        shutil.rmtree(work, ignore_errors=True)


def up_to_date_metrics(final: Path, stage: Stage, key: str) -> dict[str, Any] | None:
    """Return the metrics of the output in ``final`` if it has this fingerprint, else None."""
    if not (final / artifacts.MANIFEST).is_file():
        return None
    try:
        manifest = artifacts.read_manifest(final, stage.name)
    except ValueError:
        return None  # damaged, so it is recomputed
    return artifacts.read_json(final / METRICS) if manifest.get("fingerprint") == key else None
