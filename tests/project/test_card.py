"""Requirements of the project: its entries at the top, and its packages."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("components", "pipelines", "k8s", "src", "tests")
FILES = ("dvc.yaml", "params.yaml", "pyproject.toml")
PACKAGES = ("kfp", "torch", "transformers", "faiss-gpu", "mlflow", "dvc", "kubernetes", "pyyaml")


def packages(requirements: list[str]) -> set[str]:
    """The names in requirements, without versions and extras."""
    return {re.split(r"[^\w-]", one)[0].lower() for one in requirements}


def test_the_entries_are_at_the_top_and_in_git() -> None:
    assert [name for name in FOLDERS if not (ROOT / name).is_dir()] == []
    assert [name for name in FILES if not (ROOT / name).is_file()] == []
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = done.stdout.splitlines()
    assert {*FOLDERS} <= {path.split("/")[0] for path in kept if "/" in path}
    assert {*FILES} <= {*kept}


def test_the_packages_are_dependencies_or_extras() -> None:
    extras = [one for requirements in PROJECT["optional-dependencies"].values() for one in requirements]
    assert packages([*PROJECT["dependencies"], *extras]) >= {*PACKAGES}
    assert packages(PROJECT["dependencies"]) >= {"torch", "transformers", "pyyaml"}


def test_no_extra_brings_both_packages_of_the_module_faiss() -> None:
    extras = PROJECT["optional-dependencies"]

    def reached(extra: str) -> set[str]:
        inner = [name for one in extras[extra] for name in re.findall(r"^realmops\[(.*)\]", one)]
        found = packages(extras[extra])
        return found.union(*(reached(name) for names in inner for name in names.split(",")))

    assert reached("gpu") == {"faiss-gpu"}
    assert "faiss-cpu" in reached("dev")
    assert [extra for extra in extras if {"faiss-cpu", "faiss-gpu"} <= reached(extra)] == []
