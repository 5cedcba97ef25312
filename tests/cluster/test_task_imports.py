"""What a pod imports: a task without a model starts without torch, and none imports the clients of other tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "datasets", "dvc", "faiss", "kfp", "kfp_server_api", "kubernetes", "mlflow", "pandas", "pyarrow", "sklearn",
    "torch", "transformers",
}  # fmt: skip
START = """
import sys
from realmops.cluster import tasks

class Output:
    log_metric = staticmethod(print)
    def __init__(self, name):
        self.path, self.metadata = name, {}

one, two, options, heavy = Output("one.json"), Output("two.json"), sys.argv[1], sys.argv[2].split()
"""
PRINT = """
print("imported", *(name for name in heavy if name in sys.modules))
"""
# pyarrow imports pandas, where it is installed, as it makes an array of a list
TASKS = {
    "guard": ("tasks.guard('key', 'run', 'http://127.0.0.1:1')", {"kfp_server_api"}),
    "scale_builder": ("tasks.lower_builders('builders', 'root', 'owner')", {"pyarrow"}),
    "promote": ("tasks.promote(options, 'root', '', 0.0, one, two)", set()),
    "sample and snapshot": (
        "for stage in ('sample', 'snapshot'): tasks.run_stage(stage, options, 'root', one, two)",
        {"pandas", "pyarrow"},
    ),
    "spans by rules": (
        "for stage in ('sample', 'snapshot', 'tag'): tasks.run_stage(stage, options, 'root', one, two)",
        {"pandas", "pyarrow"},
    ),
    "stages with a model": (
        "from realmops.stages import runner, tag, ict, pretrain, finetune, evaluate",
        {"pyarrow", "torch"},
    ),
    "variant and table": ("from realmops.commands import ablate", {"pyarrow"}),
    "cloze, and a stage on a laptop": ("from realmops.commands import questions, run", {"pyarrow"}),
    "clean": ("from realmops.cluster import clean", {"pyarrow"}),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_imports_what_it_needs(task: str, tmp_path: Path) -> None:
    """The first five do their work here; the others are at its beginning."""
    code, needed = TASKS[task]
    options = {"sample": {"subjects": 60}, "tag": {"method": "phrases"}}
    command = [sys.executable, "-c", f"{START}{code}\n{PRINT}", json.dumps(options), " ".join(sorted(HEAVY))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "KUBECONFIG"))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.splitlines()[-1].split()[1:]} == needed
