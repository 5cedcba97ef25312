"""Every command has its place in `realmops --help`, which imports nothing heavy; Ctrl-C ends any import."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import click
import pytest
from small_project import group_exists, wait_for, write_project

from realmops.cli import HEADINGS, main
from realmops.cli.group import LONG

HEAVY = {"torch", "mlflow", "dvc", "numpy", "pyarrow", "tokenizers", "faiss", "pandas", "pydantic", "rich"}
HELP = "import sys; from click.testing import CliRunner; from realmops.cli import main; "
HELP += "assert CliRunner().invoke(main, ['--help']).exit_code == 0; print(*sys.modules)"


def test_every_command_has_one_heading() -> None:
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(main.commands)


def test_help_loads_no_heavy_module() -> None:
    loaded = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True).stdout
    assert HEAVY & {*loaded.split()} == set()


def test_long_commands_log_a_line_before_their_imports(capsys: pytest.CaptureFixture[str]) -> None:
    for name in LONG:
        context = click.Context(main.commands[name])
        context.params["file"] = Path("questions.jsonl")
        with mock.patch.object(click.Command, "invoke", return_value=["its work"]):
            main.commands[name].invoke(context)
        assert capsys.readouterr() == ("its work\n", f"{name}: starting\n")


@pytest.mark.parametrize("module", ["click", "pydantic", "numpy", "torch"])
def test_ctrl_c_while_a_run_imports_ends_it_without_a_traceback_and_without_orphans(
    tmp_path: Path, module: str
) -> None:
    """A process at the import of a module, which swallows the exception, gets the signal with its group."""
    words = ["realmops", "run", "all", "--params", str(write_project(tmp_path)), "--root", str(tmp_path / "root")]
    waiting = (
        "import signal, sys, time; signal.signal(2, signal.default_int_handler); sys.argv = sys.argv[1:]\n"
        "class Waiting:\n    def find_spec(self, name, *_):\n"
        "        try:\n"
        f"            if name == {module!r}:\n                print('waits', flush=True); time.sleep(60)\n"
        "        except KeyboardInterrupt:\n            pass\n"
        "sys.meta_path.insert(0, Waiting())\nfrom realmops.__main__ import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    assert "waits\n" in process.stdout
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    if module == "click":
        assert (process.returncode, printed) == (-signal.SIGINT, "")
    else:
        assert process.returncode == 130, printed
        assert printed.startswith("run: starting\n")
        assert "stopped" in printed.splitlines()[-1]
        assert "Traceback" not in printed
    wait_for(lambda: not group_exists(process.pid), 10)
