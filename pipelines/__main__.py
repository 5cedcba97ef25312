"""Compiles pipelines and components: ``python -m pipelines [FOLDER] [--image IMAGE] [--queue NAME]``.

Pipelines go to that folder, else to this one, where git and the wheel have them. Components go to ``components`` in
that folder, else to ``build/components``, for pipelines of your own. Their pods have ``IMAGE``, else the released image
of this version. The pipelines' pods wait in the queue ``NAME`` of Kueue's, by their label:
Kubeflow Pipelines puts labels on pods as they are in the compiled file and fills in no parameter there (its
argocompiler/container.go, extendPodMetadata), so the queue is no parameter of a pipeline.
"""

import argparse
from importlib import import_module
from pathlib import Path

from kfp import compiler

from pipelines import pods
from realmops.cluster import IMAGE

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PIPELINES = {"train": "realm", "ablations": "ablate", "refresh": "refresh"}  # function and module
parser = argparse.ArgumentParser(prog="python -m pipelines", description="Compile pipelines and components.")
parser.add_argument("folder", nargs="?", type=Path, help="else pipelines, for components build")
parser.add_argument("--image", default=IMAGE, help=f"of their pods, else {IMAGE}")
parser.add_argument("--queue", default="", metavar="NAME", help="Kueue's LocalQueue that the pipelines' pods wait in")
given = parser.parse_args()
pods.QUEUE = given.queue  # pipelines make their pods when they are imported
names = sorted(path.stem for path in (ROOT / "components").glob("*.py"))
sources = {
    given.folder or ROOT / "pipelines": {
        name: getattr(import_module(f"pipelines.{module}"), name) for name, module in PIPELINES.items()
    },
    (given.folder or BUILD) / "components": {
        name: getattr(import_module(f"components.{name}"), name) for name in names
    },
}
for folder, compiled in sources.items():
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in compiled.items():
        file = folder / f"{name}.yaml"
        compiler.Compiler().compile(source, str(file))
        file.write_text(file.read_text(encoding="utf-8").replace(IMAGE, given.image), encoding="utf-8")
