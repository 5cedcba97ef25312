"""Compiled pipelines by Kubeflow's local runner, whose tasks are forked from a process that imported what they need.

The command of a task is run as it is, up to the Python that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing import connection, get_context, process
from pathlib import Path
from typing import Any

from forked import redirect, run_program

EXECUTOR = "kfp.dsl.executor_main"
SHOW = """#!/bin/sh
printf '%s\\0' "$_KFP_RUNTIME" "$@"
"""  # in the place of Python


def run(pipeline: Path, outputs: Path, arguments: dict[str, Any]) -> None:
    """Run a pipeline with these arguments in this process; failed tasks are retried at once."""
    from kfp import components, local
    from kfp.dsl import executor  # noqa: F401  # for the tasks
    from kfp.local import subprocess_task_handler
    from kfp.local.orchestrator import task_executor

    with tempfile.TemporaryDirectory() as folder:
        show = Path(folder, "show")
        show.write_text(SHOW)
        show.chmod(0o700)
        subprocess_task_handler.run_local_subprocess = Tasks(show)
        task_executor.time.sleep = lambda seconds: None
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(outputs))
        components.load_component_from_file(str(pipeline))(**arguments)


class Tasks:
    """Runner of tasks; its process, from which they are forked, has no threads, as that of the runner has."""

    def __init__(self, show: Path) -> None:
        self._show = show
        self._listener = connection.Listener(family="AF_UNIX")
        get_context("fork").Process(target=_fork_tasks, args=(self._listener,), daemon=True).start()

    def __call__(self, full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        """Print what the command prints; return its exit code."""
        shell, flags, script, *rest = full_command
        words = [shell, flags, script.replace(sys.executable, str(self._show)), *rest]
        shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
        assert shown[:3] == ["true", "-m", EXECUTOR], shown
        with tempfile.NamedTemporaryFile() as log, connection.Client(self._listener.address) as server:
            server.send((shown[3:], env_vars or {}, Path(log.name)))
            code: int = server.recv()
            print(Path(log.name).read_text())
        return code


def _fork_tasks(listener: connection.Listener) -> None:
    while True:
        with listener.accept() as client:
            if os.fork():
                continue
            process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # that has no children
            task = get_context("fork").Process(target=_run_task, args=client.recv())
            task.start()
            task.join()
            client.send(task.exitcode)
            os._exit(0)


def _run_task(words: list[str], variables: dict[str, str], log: Path) -> None:
    redirect(log)
    os.environ.update(variables, _KFP_RUNTIME="true")
    run_program(EXECUTOR, words)
