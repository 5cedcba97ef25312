"""Write the components in the layout of the public catalog kubeflow/pipelines-components.

    python scripts/component_catalog.py FOLDER --approver NAME --verified YYYY-MM-DD

FOLDER is a clone of the catalog, in which its own ``scripts.generate_readme`` then writes the READMEs. NAME is an
account on GitHub, in the catalog a member of the Kubeflow community. The catalog removes components that nobody has
verified for a year.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from realmops.cluster import IMAGE

ROOT = Path(__file__).parents[1]
IMPORT = "from realmops.cluster import IMAGE\n"  # the catalog allows only the standard library and kfp in modules
CATEGORIES = {
    "data_processing": ("inputs", "snapshot", "sample", "tag", "cloze"),
    "training": ("ict", "pretrain", "finetune", "scale_builder"),
    "evaluation": ("evaluate", "variant", "table"),
    "deployment": ("guard", "promote", "refresh"),
}


def component_source(name: str) -> str:
    """Return the module of a component without imports from this package: the image is a literal."""
    source = (ROOT / "components" / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(IMPORT) == source.count("base_image=IMAGE") == 1
    return source.replace(f"\n{IMPORT}", "").replace("base_image=IMAGE", f'base_image="{IMAGE}"')


def metadata(name: str, category: str, verified: date) -> str:
    """Return metadata.yaml; the catalog requires the fields in this order."""
    return f"""\
---
name: realmops_{name}
stability: alpha
dependencies:
  kubeflow:
    - name: Pipelines
      version: ">={version("kfp")}"
tags:
  - {category}
  - retrieval
  - question_answering
lastVerified: {verified}T00:00:00Z
"""


def write_catalog(folder: Path, approvers: Sequence[str], verified: date) -> None:
    """Write a folder for each component."""
    owners = "\n".join(["approvers:", *(f"  - {approver}" for approver in approvers)]) + "\n"
    for category, names in CATEGORIES.items():
        for name in names:
            target = folder / "components" / category / f"realmops_{name}"
            target.mkdir(parents=True, exist_ok=True)
            source = component_source(name)
            [function] = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
            files = {
                "__init__.py": f'from .component import {function}\n\n__all__ = ["{function}"]\n',
                "component.py": source,
                "metadata.yaml": metadata(name, category, verified),
                "OWNERS": owners,
            }
            for file, text in files.items():
                (target / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the components in the layout of kubeflow/pipelines-components.")
    parser.add_argument("folder", type=Path, help="clone of the catalog")
    parser.add_argument("--approver", action="append", required=True, metavar="NAME", help="account on GitHub")
    parser.add_argument(
        "--verified", type=date.fromisoformat, required=True, metavar="YYYY-MM-DD", help="day of the last verification"
    )
    arguments = parser.parse_args()
    write_catalog(arguments.folder, arguments.approver, arguments.verified)
