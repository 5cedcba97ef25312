"""Every command has its place in `realmops --help`, which imports nothing heavy."""

import subprocess
import sys

from realmops.cli import HEADINGS, main

HEAVY = {"torch", "mlflow", "dvc", "numpy", "pyarrow", "tokenizers", "faiss", "pandas", "pydantic", "rich"}
HELP = "import sys; from click.testing import CliRunner; from realmops.cli import main; "
HELP += "assert CliRunner().invoke(main, ['--help']).exit_code == 0; print(*sys.modules)"


def test_every_command_has_one_heading() -> None:
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(main.commands)


def test_help_loads_no_heavy_module() -> None:
    loaded = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True).stdout
    assert HEAVY & {*loaded.split()} == set()
