"""What waits to be sent to MLflow: a ticket for each stage of a run, with what was sent already beside it."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realmops.artifacts import link_or_copy, read_json, sha256_file, write_bytes, write_json
from realmops.tracking.client import chosen_uri, digest_of_address

ENDING = ".ticket.json"


class Ticket:
    """One stage's figures on their way to MLflow, as files of the spool.

    ``path`` says what is to be sent, by the key ``final`` also how the stage ended. Beside it lie ``shipped``, what
    was sent and where to; ``journal`` and ``files``, copies of what the stage may move away; and ``lock``, which the
    one that sends holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shipped, self.journal, self.files, self.lock = (
            path.with_name(path.name.removesuffix(ENDING) + ending)
            for ending in (".shipped.json", ".jsonl", ".files", ".lock")
        )

    @classmethod
    def of(cls, folder: Path, run_key: str, stage: str) -> Ticket:
        """That of a stage of a run under a tracking folder."""
        name = re.sub(r"[^A-Za-z0-9_-]", "_", run_key)
        return cls(folder / "spool" / f"{name}.{stage}{ENDING}")

    def read(self) -> dict[str, Any]:
        """What is to be sent."""
        content: dict[str, Any] = read_json(self.path)
        return content

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what is to be sent."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, dict(content))

    def ended(
        self, status: str, time: float, metrics: Mapping[str, Any], files: Mapping[str, Path | bytes]
    ) -> dict[str, Any]:
        """How a stage ended, with the sha256 of its files by name; they are kept, whatever becomes of them."""
        shutil.rmtree(self.files, ignore_errors=True)
        if files:
            self.files.mkdir(parents=True)
        for name, content in files.items():
            if isinstance(content, bytes):
                write_bytes(self.files / name, content)
            else:
                link_or_copy(content, self.files / name)
        digests = {name: sha256_file(self.files / name) for name in sorted(files)}
        return {"time": time, "metrics": finite(metrics), "status": status, "files": digests}

    @property
    def is_sent(self) -> bool:
        """Whether all was sent. Final figures go last, so they tell; a running or killed stage has none yet."""
        final = self.read().get("final")
        return final is not None and self.shipped.is_file() and bool(read_json(self.shipped)["final"] == final)

    def forget(self) -> None:
        """Remove all but what says that it was sent."""
        self.path.unlink()
        self.journal.unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)


def tickets(folder: Path) -> list[Ticket]:
    """All of a tracking folder."""
    return [Ticket(path) for path in sorted((folder / "spool").glob(f"*{ENDING}"))]


def unsent(folder: Path) -> list[str]:
    """The journals of finished stages under this tracking folder that MLflow has not got whole."""
    waiting = [(ticket, ticket.read()) for ticket in tickets(folder)]
    return [
        str(content["journal"])
        for ticket, content in waiting
        if content.get("final") is not None and not ticket.is_sent
    ]


def sent_run(folder: Path, stage: str, metrics: Mapping[str, Any]) -> str | None:
    """The id of the run that holds these final figures of a stage; None when they were sent nowhere or elsewhere."""
    place = digest_of_address(chosen_uri(folder))
    wanted = finite({f"final/{stage}.{name}": value for name, value in metrics.items()}).items()
    for path in sorted((folder / "spool").glob(f"*.{stage}.shipped.json")):
        shipped = read_json(path)
        if shipped["destination"][0] == place and shipped["final"] and wanted <= shipped["final"]["metrics"].items():
            return str(shipped["destination"][1])
    return None


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def warn(trouble: str, journal: str) -> None:
    """Say that something was not sent, and where it is kept."""
    print(
        f"warning: MLflow tracking: {trouble}. Nothing is lost: metrics are in {journal}; "
        "`realmops sync` sends what is left.",
        file=sys.stderr,
        flush=True,
    )
