"""`make setup` lets uv install, from where the user's pip is told to look."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of a machine without packages: nothing is installed, the variables of uv's call are kept.
UV = '#!/bin/sh\necho "$@" >> calls\nif [ "$1" = pip ]; then env > environment; exit ${UV_FAILS:-0}; fi\n'
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
    cat << 'END'
global.cert='/certificates.pem'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://global.example/simple'
install.index-url='https://install.example/simple'
END
else
    exec {sys.executable} "$@"
fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that the set-up reads, with a uv and a Python that do nothing."""
    (tmp_path / "bin").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (("uv", UV), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def setup(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_", "MAKE"))}
    environment = {**kept, **variables, "PATH": f"{project / 'bin'}:{os.environ['PATH']}"}
    words = ["make", "setup", f"PYTHON={project / 'bin/python'}"]
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)


def test_uv_uses_the_indexes_of_pips_configuration(project: Path) -> None:
    result = setup(project, PIP_FIND_LINKS="/wheels https://three.example/wheels")
    assert result.returncode == 0, result.stderr
    assert "--constraint constraints.txt --editable .[dev]" in (project / "calls").read_text()
    lines = (project / "environment").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if line.startswith(("UV_", "SSL_"))) == {
        "UV_DEFAULT_INDEX": "https://install.example/simple",
        "UV_EXTRA_INDEX_URL": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/wheels,https://three.example/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/certificates.pem",
    }


def test_a_complete_set_up_calls_nothing_and_a_failed_one_is_repeated(project: Path) -> None:
    failed = setup(project, UV_FAILS="1")
    assert failed.returncode != 0
    assert "the packages could not be installed; see the reason above" in failed.stderr
    assert setup(project).returncode == 0
    calls = (project / "calls").read_text()
    assert calls.count("pip install") == 2
    assert setup(project).stdout == ""
    assert (project / "calls").read_text() == calls
    (project / "constraints.txt").write_text("")
    assert setup(project).returncode == 0
    assert (project / "calls").read_text() != calls
