"""The compiled pipelines of the project, and the options of the small project for them."""

import shutil
from pathlib import Path
from typing import Any

import small_project
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "realmops"
PIPELINES = ROOT / "pipelines"


def file_of(pipeline: str) -> Path:
    return PIPELINES / f"{pipeline}.yaml"


def project_with_pipeline(folder: Path) -> Path:
    """The toy project in a folder, with a copy of the compiled pipeline."""
    small_project.write_project(folder)
    init_dvc(folder)
    (folder / "pipelines").mkdir()
    shutil.copy(file_of("train"), folder / "pipelines" / "train.yaml")
    return folder


def documents(text: str) -> list[dict[str, Any]]:
    """Those of a YAML file; by the loader in C, as these files are long."""
    return [*yaml.load_all(text, yaml.CSafeLoader)]


def compiled(pipeline: str) -> dict[str, Any]:
    return documents(file_of(pipeline).read_text())[0]


def options(project: Path, **changes: dict[str, Any]) -> str:
    """The toy project's options; names of files as a pod sees them."""
    names = {"snapshot.documents": "documents.jsonl", "tag.train": "tagged.conll", "tag.dev": "tagged.conll"}
    names |= {f"questions.{split}": f"questions.{split}.jsonl" for split in small_project.QUESTIONS}
    files = {key: str(project / name) for key, name in names.items()}
    return small_project.toy_values(**changes).replace(files).model_dump_json()


def init_dvc(folder: Path, remote: str = "") -> None:
    """Make a folder a project of DVC without git, as ``dvc init --no-scm`` and ``dvc remote add --default`` do."""
    (folder / ".dvc").mkdir()
    remote = remote or f"{folder}/.dvc/remote"
    config = f"[core]\n    no_scm = True\n    remote = store\n['remote \"store\"']\n    url = {remote}\n"
    (folder / ".dvc" / "config").write_text(config)
