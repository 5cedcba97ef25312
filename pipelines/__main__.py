"""Compile pipelines and components: ``python -m pipelines [FOLDER] [--image IMAGE] [--queue NAME]``.

Pipelines are written to FOLDER, by default to this folder, from which git and the wheel take them. Components are
written to FOLDER/components, by default to ``build/components``, and the pipelines as Kubernetes objects to
FOLDER/objects, by default to ``build/objects``. Pods use IMAGE, by default the released image of this
version. With --queue, the pipelines' pods have the label of that Kueue queue. The queue is no parameter of a pipeline,
because Kubeflow Pipelines copies pod labels from the compiled file without substituting parameters (its
argocompiler/container.go, extendPodMetadata).
"""

import argparse
from importlib import import_module
from pathlib import Path

from kfp import compiler

from pipelines import pods
from pipelines.objects import write_kustomization, write_objects
from realmops.cluster import IMAGE

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PIPELINES = {"train": "realm", "ablations": "ablate", "refresh": "refresh"}  # function and module
parser = argparse.ArgumentParser(prog="python -m pipelines", description="Compile pipelines and components.")
parser.add_argument("folder", nargs="?", type=Path, help="output folder (default: pipelines, and build for all else)")
parser.add_argument("--image", default=IMAGE, help=f"image of the pods (default: {IMAGE})")
parser.add_argument("--queue", default="", metavar="NAME", help="Kueue's LocalQueue for the pipelines' pods")
arguments = parser.parse_args()
pods.QUEUE = arguments.queue  # read when the pipelines are imported
names = sorted(path.stem for path in (ROOT / "components").glob("*.py"))
sources = {
    arguments.folder or ROOT / "pipelines": {
        name: getattr(import_module(f"pipelines.{module}"), name) for name, module in PIPELINES.items()
    },
    (arguments.folder or BUILD) / "components": {
        name: getattr(import_module(f"components.{name}"), name) for name in names
    },
}
for folder, compiled in sources.items():
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in compiled.items():
        file = folder / f"{name}.yaml"
        compiler.Compiler().compile(source, str(file))
        file.write_text(file.read_text(encoding="utf-8").replace(IMAGE, arguments.image), encoding="utf-8")
objects = (arguments.folder or BUILD) / "objects"
objects.mkdir(parents=True, exist_ok=True)
for name in PIPELINES:
    write_objects((arguments.folder or ROOT / "pipelines") / f"{name}.yaml", objects)
write_kustomization(objects, [*PIPELINES])
