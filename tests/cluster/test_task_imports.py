"""Imports of a pod: a task without a model starts without torch, and none imports the clients of other tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    *("datasets", "dvc", "faiss", "kfp", "kfp_server_api", "kubernetes", "mlflow", "pandas", "pyarrow", "sklearn"),
    *("torch", "transformers"),
)
PROGRAM = """
import sys
from realmops.cluster import tasks

class Output:
    log_metric = staticmethod(print)
    def __init__(self, name):
        self.path, self.metadata = name, {}

one, two, options = Output("one.json"), Output("two.json"), sys.argv[1]
exec(sys.argv[2])
print("imported", *(name for name in sys.argv[3:] if name in sys.modules))
"""
STAGES = "for stage in ('sample', 'snapshot', 'tag'): tasks.run_stage(stage, options, 'root', one, two)"
# pyarrow imports pandas, where it is installed, as it makes an array of a list
TASKS = {
    "guard": ("tasks.guard('key', 'run', 'http://127.0.0.1:1')", {"kfp_server_api"}),
    "scale_builder": ("tasks.lower_builders('builders', 'root', 'owner')", {"pyarrow"}),
    "promote": ("tasks.promote(options, 'root', '', 0.0, one, two)", set()),
    "stages without a model": (STAGES, {"pandas", "pyarrow"}),
    "stages with a model": ("from realmops.stages import ict, pretrain, finetune, evaluate", {"pyarrow", "torch"}),
    "ablations": ("from realmops.commands import ablate", {"pyarrow"}),
    "cloze, and a stage on a laptop": ("from realmops.commands import questions, run", {"pyarrow"}),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_imports_only_the_libraries_that_it_needs(task: str, tmp_path: Path) -> None:
    code, needed = TASKS[task]
    options = {"sample": {"subjects": 60}, "tag": {"method": "phrases"}}
    command = [sys.executable, "-c", PROGRAM, json.dumps(options), code, *HEAVY]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "KUBECONFIG"))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.splitlines()[-1].split()[1:]} == needed
