"""Compiles the pipelines: ``python -m pipelines [FOLDER]``, into this folder where none is named."""

import sys
from pathlib import Path

from kfp import compiler

from pipelines.ablate import ablations
from pipelines.realm import train
from pipelines.refresh import refresh

folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
for name, pipeline in {"train": train, "ablations": ablations, "refresh": refresh}.items():
    compiler.Compiler().compile(pipeline, str(folder / f"{name}.yaml"))
