"""The components in the layout of kubeflow/pipelines-components.

The rules are those of the catalog at commit fab64a9: scripts/validate_metadata/validate_metadata.py for metadata.yaml
and OWNERS, docs/CONTRIBUTING.md for the files, .github/scripts/check_imports for imports. READMEs are not checked: the
catalog generates them.
"""

import ast
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from compiled import ROOT, documents

FIELDS = ["name", "stability", "dependencies", "lastVerified"]  # in this order, others between them
OPTIONAL = {"tags", "ci", "links"}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    words = ["scripts/component_catalog.py", folder, "--approver", "someone", "--verified", "2026-11-28"]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT)
    return folder


def test_each_component_has_a_folder_with_the_required_files(catalog: Path) -> None:
    folders = [*catalog.glob("components/*/*")]
    names = sorted(folder.name for folder in folders)
    assert names == sorted(f"realmops_{path.stem}" for path in (ROOT / "components").glob("*.py"))
    assert {folder.parent.name for folder in folders} == {"data_processing", "training", "evaluation", "deployment"}
    for folder in folders:
        files = {"__init__.py", "component.py", "metadata.yaml", "OWNERS"}
        assert {path.name for path in folder.iterdir()} == files


def test_metadata_and_owners_follow_the_schema(catalog: Path) -> None:
    for folder in catalog.glob("components/*/*"):
        found = yaml.safe_load((folder / "metadata.yaml").read_text())
        assert [field for field in found if field not in OPTIONAL] == FIELDS
        assert found["name"] == folder.name
        assert found["stability"] in {"experimental", "alpha", "beta", "stable"}
        assert found["lastVerified"] == datetime(2026, 11, 28, tzinfo=UTC)
        assert found["dependencies"].keys() <= {"kubeflow", "external_services"}
        assert [one["name"] for one in found["dependencies"]["kubeflow"]] == ["Pipelines"]
        for one in found["dependencies"]["kubeflow"]:
            version = one["version"].removeprefix(">=").split(".")
            assert [part.isdigit() for part in version] == [True] * 3
        assert all(isinstance(tag, str) for tag in found["tags"])
        assert (folder / "OWNERS").read_text() == "approvers:\n  - someone\n"


def test_a_component_imports_kfp_alone_and_compiles_to_ours(catalog: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pipelines", tmp_path / "ours"], check=True, cwd=ROOT)
    program = """
import importlib, pathlib, sys
from kfp import compiler
for folder in pathlib.Path("components").glob("*/*"):
    module = importlib.import_module(".".join(folder.parts))
    [name] = module.__all__
    compiler.Compiler().compile(getattr(module, name), f"{sys.argv[1]}/{name}.yaml")
assert not [name for name in sys.modules if name.split(".")[0] == "realmops"]
"""
    (tmp_path / "theirs").mkdir()
    subprocess.run([sys.executable, "-c", program, tmp_path / "theirs"], check=True, cwd=catalog)
    for file in (tmp_path / "ours/components").glob("*.yaml"):
        theirs = documents((tmp_path / "theirs" / file.name).read_text())
        assert theirs == documents(file.read_text())
    for file in catalog.glob("components/*/*/component.py"):
        imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert [ast.unparse(node) for node in imports] == ["from kfp import dsl"]
