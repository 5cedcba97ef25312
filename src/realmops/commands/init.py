"""``realmops init``: create a project from the package's templates, with presets chosen by the user's documents."""

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from realmops import artifacts, hub
from realmops.options import ENCODER, NO_READER
from realmops.questions.question_sets import read_judged_questions
from realmops.resources import resource_folder
from realmops.starter.choose_models import UNTRAINED, check_model, choose_model, choose_reader
from realmops.starter.choose_questions import add_judged_questions, add_questions
from realmops.starter.cluster_files import BASES, PLACEHOLDER, job_files, kustomization_text
from realmops.starter.describe_documents import add_documents
from realmops.starter.git_origin import GitOrigin
from realmops.starter.new_project import Project
from realmops.starter.project_files import (
    TEMPLATES,
    VARIED,
    dvc_text,
    gitignore_text,
    params_text,
    project_text,
)

ALWAYS = "params.yaml", "dvc.yaml", "kustomization.yaml", f"k8s/{BASES}"


def init(
    folder: Path,
    documents: Path | None,
    questions: Sequence[Path],
    encoder: str | None,
    cluster: str,
    image: str | None,
    reader: str | None = None,
) -> Iterator[str]:
    """Write a project into a folder; yield a description of the input, and the next commands.

    ``documents`` None is the synthetic encyclopedia; after a ValueError nothing was written.
    """
    project = Project(folder)
    for option, name, family in (("--encoder", encoder, hub.BERT), ("--reader", reader, hub.READER)):
        if name not in (None, "small", NO_READER):
            check_model(option, name, family)
    if documents is not None:
        size = add_documents(project, documents)
        project.presets += choose_model(project, encoder, size)
        if encoder is None and "language" in project.own["snapshot"]:
            project.lines[-1] += "; name an encoder of the documents' language, or a multilingual one, with --encoder"
        judged = {} if questions else read_judged_questions(documents)
        if questions:
            add_questions(project, questions)
        elif judged:
            project.presets.append("documents")
            add_judged_questions(project, judged)
        else:
            project.presets.append("documents")
            project.lines.append("questions: none; label yours after the stage snapshot: realmops questions --label")
        if judged and reader is None:
            project.lines.insert(
                0, "search, not answers: the questions have relevance judgements; --reader adds a reader"
            )
        else:
            choose_reader(project, reader, has_questions=bool(questions))
        if project.options.reader.init != ENCODER:
            project.presets.append(UNTRAINED)
            project.lines.append(
                "models: as published (preset untrained); 'realmops adapt' trains them on your documents"
            )
    elif questions or encoder or reader:
        raise ValueError("--questions, --encoder and --reader need --documents; the sample corpus has its own")
    project.put("tracking.experiment", folder.resolve().name or "realmops")
    places = [*TEMPLATES]
    if os.path.lexists(folder / "README.md"):
        places.remove("README.md")
        project.lines.append(f"{folder / 'README.md'} exists and is kept")
    names = (*ALWAYS, *places, *project.files)
    parents = {str(parent) for name in names for parent in Path(name).parents if not (folder / parent).is_dir()}
    existing = [name for name in (*names, *sorted(parents)) if os.path.lexists(folder / name)]
    if existing:
        raise ValueError(f"{folder / existing[0]} exists and would be overwritten; choose another folder, or move it")
    options, origin = project.options, GitOrigin.of(folder)
    for key in VARIED:
        project.put(key, options.get(key))
    cluster_files = {
        "kustomization.yaml": kustomization_text(cluster, image, job_files(folder)),
        **{place: project_text(place, folder, origin, cluster) for place in places},
    }
    project.files |= {
        "params.yaml": params_text(project.presets, project.own),
        "dvc.yaml": dvc_text(options, {f"{section}.{key}" for section, keys in project.own.items() for key in keys}),
        ".gitignore": gitignore_text(folder / ".gitignore"),
        **cluster_files,
    }
    for name, text in project.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_bytes(folder / name, text.encode())
    ignored = shutil.ignore_patterns("README.md", "overlays", "__pycache__")
    shutil.copytree(resource_folder("k8s"), folder / "k8s" / BASES, ignore=ignored)
    yield from project.lines
    if origin.address:
        yield f"git: {origin.address}, branch {origin.branch}, in k8s/argo-cd.yaml and k8s/flux.yaml"
    if to_set := [name for name, text in cluster_files.items() if PLACEHOLDER in text and name != "README.md"]:
        yield f"set each {PLACEHOLDER} in {', '.join(to_set)} before you use a cluster"
    yield f"written: {', '.join(str(folder / name) for name in project.files)}, {folder / 'k8s' / BASES}"
    place = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    dvc = "DVC" if find_spec("dvc") is not None else "DVC (pip install 'realmops[dvc]')"
    yield f"next: {place}realmops run all; or with {dvc}, after 'git init' and 'dvc init': {place}dvc repro"
