"""Reports: log lines, warnings and progress bars of work that takes long."""

from collections.abc import Callable
from typing import Protocol


class Report(Protocol):
    """Receiver of log lines, warnings and progress."""

    def log(self, message: str) -> None:
        """Log an informational line."""

    def warn(self, message: str) -> None:
        """Log a warning that the user should act on."""

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """Start a progress bar; the returned callback takes the units completed since its last call ("B" is bytes)."""


class SilentReport:
    """A report that discards everything."""

    def log(self, message: str) -> None:
        pass

    warn = log

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        return lambda units: None
