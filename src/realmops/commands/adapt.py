"""``realmops adapt``: train the models of a project of documents, and keep them only if they are better."""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from realmops import artifacts
from realmops.artifacts import WORK_FOLDER
from realmops.commands.ablate import replace_symlink
from realmops.commands.params import rewritten
from realmops.commands.run import run_stages
from realmops.config import load_params, preset_path
from realmops.config_yaml import read_params, read_yaml
from realmops.evaluate.compare import compare_runs, format_comparison
from realmops.options import ENCODER, Options
from realmops.progress import Report
from realmops.questions.cloze import KIND
from realmops.questions.question_sets import read_questions
from realmops.stages import CLOZE_STEP, METRICS, STAGES, STEP_FOLDERS, option_files, planned_steps
from realmops.stages.runner import stage_lock
from realmops.starter.choose_models import UNTRAINED
from realmops.starter.project_files import dvc_text
from realmops.tracking.runs import tracking_folder

ADAPT, PUBLISHED = "adapt", "published"  # work folders: the trained models, and the evaluation of the published ones
TRAINED_COST = 4.0  # of a training step on a passage with its crops, or on a question, in embeddings of a passage


def adapt(
    params: Path, presets: Sequence[str], settings: Sequence[str], *, root: Path, report: Report
) -> Iterator[str]:
    """Train in the work folder, compare with the published models on the same questions, and keep the better.

    The models in ``root`` are replaced after the comparison; an interrupted training resumes.
    """
    (named, _), before, project = read_params(params), load_params(params), params.parent
    if UNTRAINED not in named:
        raise ValueError(f"{params}: presets lacks {UNTRAINED}: 'realmops run all' trains with these options already")
    names = [name for name in named if name != UNTRAINED] + [*presets]
    text, _, after = rewritten(params, names, settings)
    measured = before.questions.test or before.questions.dev or after.questions.test
    trained = after.replace({"questions.test": measured})
    steps = [step for step in planned_steps(trained) if step not in ("sample", "snapshot")]
    run = partial(run_stages, project=project, report=report, force=False)
    work = root / WORK_FOLDER / ADAPT
    with stage_lock(root / WORK_FOLDER, ADAPT):
        list(run(planned_steps(before), before, presets=named, root=root))
        yield _duration(after, project, root)
        for folder in (STEP_FOLDERS["snapshot"], tracking_folder(Path())):
            if (root / folder).is_dir():
                replace_symlink(root / folder, work / folder)
        list(run(steps, trained, presets=names, root=work))
        published = root
        if before.questions.test != measured:
            published = work / PUBLISHED
            for place, folder in ((root, STEP_FOLDERS["snapshot"]), (root, "models"), (work, STEP_FOLDERS[CLOZE_STEP])):
                if (place / folder).is_dir():
                    replace_symlink(place / folder, published / folder)
            list(run(["evaluate"], before.replace({"questions.test": measured}), presets=named, root=published))
        rows = compare_runs(work, published, seed=after.run.seed)
        yield f"adapted against published models, on {measured}, which neither was trained on:"
        yield from (f"  {format_comparison(row)}" for row in rows)
        if next((row.difference.mean for row in rows if row.difference.mean), 0.0) > 0:
            for step in steps:
                source, kind = work / STEP_FOLDERS[step], KIND if step == CLOZE_STEP else step
                with artifacts.atomic_folder(root / STEP_FOLDERS[step], kind) as out:
                    shutil.copytree(source, out, copy_function=artifacts.link_or_copy, dirs_exist_ok=True)
            _write(params, text, before, after, report)
            list(run(planned_steps(after), after, presets=names, root=root))
            yield f"better, so the adapted models are kept, without the preset {UNTRAINED}; undo: realmops adapt --undo"
        else:
            yield f"not better, so the published models are kept; {params} is unchanged"
        shutil.rmtree(work)


def undo(params: Path, *, root: Path, report: Report) -> Iterator[str]:
    """Put the published models back, which takes as long as the first run; questions and other options stay."""
    (named, _), before = read_params(params), load_params(params)
    if UNTRAINED in named or before.reader.init == ENCODER:
        raise ValueError(f"{params}: there is nothing to undo: no adapted models with a published reader or none")
    idle = {name: keys for name, keys in read_yaml(preset_path(UNTRAINED, params)).items() if name != "questions"}
    settings = [f"{section}.{key}={value}" for section, keys in idle.items() for key, value in keys.items()]
    text, _, after = rewritten(params, [*named, UNTRAINED], settings)
    results = root / STEP_FOLDERS["evaluate"]
    if "evaluate" not in planned_steps(after) and results.is_dir():  # of the adapted models
        artifacts.check_replaceable(results, "evaluate", by_name=True)
        shutil.rmtree(results)
    _write(params, text, before, after, report)
    steps, presets = planned_steps(after), [*named, UNTRAINED]
    list(run_stages(steps, after, presets=presets, project=params.parent, root=root, report=report, force=False))
    yield f"the models are as published; {params} has the preset {UNTRAINED} again"


def _write(params: Path, text: str, before: Options, after: Options, report: Report) -> None:
    """Write the params file, and dvc.yaml if it is that of the options before."""
    own = {f"{section}.{key}" for section, keys in read_params(params)[1].items() for key in keys}
    file = params.parent / "dvc.yaml"
    if file.is_file() and file.read_text(encoding="utf-8") == dvc_text(before, own):
        artifacts.write_bytes(file, dvc_text(after, own).encode())
    elif file.is_file():
        report.warn(f"{file} is your own: its stages must be {', '.join(planned_steps(after))}")
    artifacts.write_bytes(params, text.encode())


def _duration(options: Options, project: Path, root: Path) -> str:
    """Return a sentence on the time of the training, from that of the passages' embedding on this machine."""
    from realmops.train.inverse_cloze import ict_steps

    passages = artifacts.read_json(root / STEP_FOLDERS["snapshot"] / METRICS)["passages"]
    seconds = artifacts.read_json(root / STEP_FOLDERS["finetune"] / METRICS)["seconds"]
    crops, tuning = ict_steps(passages, options.ict)[0] * min(options.ict.batch_size, passages), options.finetune
    file = option_files(STAGES["finetune"], options, project, root).get("questions.train")
    epochs = tuning.retriever_epochs + tuning.epochs
    questions = len(read_questions([file])) if epochs and file else 0
    minutes = seconds * (2 + TRAINED_COST * (crops + questions * epochs) / passages) / 60
    return (
        f"adapt: trains for about {max(1, round(minutes))} minutes: {crops:,} passages with crops, {questions:,} "
        f"questions {epochs:g} times; you can interrupt and repeat it, and ask meanwhile"
    )
