"""`realmops --help` answers at once: processor time as a multiple of another process's, no clock."""

import os
import subprocess
import sys

from realmops.cli import HEADINGS, main

HEAVY = (
    "torch", "mlflow", "dvc", "numpy", "pyarrow", "tokenizers", "faiss", "pandas", "matplotlib", "pydantic", "rich",
)  # fmt: skip
HELP = "import sys; sys.argv = ['realmops', '--help']; from realmops.cli import main; main()"
FLOOR = "import click, yaml"
# The goal is 0.3 s where the floor takes 0.075 s. One import of torch or mlflow is 15 to 40 times the floor.
BUDGET = 4
ROUNDS = 5


def user_seconds(code: str) -> float:
    """User CPU time of a new interpreter that runs ``code``."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, code
    return usage.ru_utime


def test_help_stays_within_its_share_of_processor_time() -> None:
    pairs = [(user_seconds(FLOOR), user_seconds(HELP)) for _ in range(ROUNDS)]
    floor, ours = (min(times) for times in zip(*pairs, strict=True))
    assert ours <= BUDGET * floor, f"--help takes {ours:.3f} s of user time, `{FLOOR}` {floor:.3f} s"


def test_every_command_has_one_heading() -> None:
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(main.commands)


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from realmops.cli import main; "
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0, result.output; "
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []
