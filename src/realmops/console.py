"""What the command line shows: bars on a terminal, plain lines elsewhere, one message for an error."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_SECONDS = 10.0
CHIEF = {  # of the stages that have many figures
    "finetune": ("questions", "span_loss", "dev_em", "dev_f1", "dev_answered", "dev_answered_precision", "seconds"),
    "evaluate": (
        *("questions", "em", "f1", "rule_em", "closed_book_em", "recall_at_5", "ceiling_in_corpus"),
        *("answered", "answered_precision", "seconds"),
    ),
}


class Console:
    """Implements ``stages.Report`` on standard error; the results of a stage go to standard output."""

    def say(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        print(f"warning: {message}", file=sys.stderr, flush=True)

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """A bar with rate and time left; without a terminal a line every ten seconds. The unit "B" is shown in MB."""
        return _bar(label, total, unit) if sys.stderr.isatty() else _plain(label, total, unit)

    def metrics(self, name: str, metrics: Mapping[str, Any], file: Path | None = None) -> None:
        """The figures of a finished stage, on one line; of many the chief ones, and ``file``, which has them all."""
        chief = [key for key in CHIEF.get(name, ()) if key in metrics] if file else []
        shown = [
            f"{key}={metrics[key]:.4g}" if isinstance(metrics[key], float) else f"{key}={metrics[key]}"
            for key in chief or metrics
        ]
        rest = f"; all {len(metrics)} figures are in {file}" if chief else ""
        print(f"{name}: {', '.join(shown)}{rest}", flush=True)


def show(text: str | Table, columns: int = 120) -> None:
    """Print a text as it is, or a table as wide as the terminal; elsewhere than on a terminal so many columns wide."""
    if isinstance(text, str):
        print(text, flush=True)
        return
    from rich.console import Console as Screen

    Screen(width=None if Screen().is_terminal else columns).print(text)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: half-written files are removed, child processes stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def explained_errors() -> Iterator[None]:
    """Errors that a person can mend end the process with one message; exit code 2, of a TimeoutError 1."""
    try:
        yield
    except (ValueError, TimeoutError) as error:
        _end(f" {error}", 2 if isinstance(error, ValueError) else 1)
    except RuntimeError as error:
        from realmops.refresh.exchange import ExchangeError

        if not isinstance(error, ExchangeError):
            raise
        _end(f" {error}")
    except OSError as error:
        path = error.filename2 or error.filename
        name = f" {path}:" if path else ""
        advice = " Make room and run the same command again: it goes on where it was." if error.errno == ENOSPC else ""
        _end(f"{name} {error.strerror or error}.{advice}")


def _end(message: str, code: int = 2) -> None:
    print(f"realmops:{message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _bar(label: str, total: int, unit: str) -> Callable[[int], None]:
    from tqdm import tqdm

    how: dict[str, Any] = {"unit": unit, "unit_scale": True} if unit else {}
    bar = tqdm(total=total or None, desc=label, file=sys.stderr, dynamic_ncols=True, mininterval=0.3, **how)

    def update(done: int) -> None:
        bar.update(done)
        if bar.total is not None and bar.n >= bar.total:
            bar.close()

    return update


def _plain(label: str, total: int, unit: str) -> Callable[[int], None]:
    started = last = time.monotonic()
    done = 0

    def update(units: int) -> None:
        nonlocal done, last
        done += units
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and done != total:
            return
        last = now
        rate = done / max(now - started, 1e-9)
        left = f", {(total - done) / max(rate, 1e-9):.0f} s left" if total else ""
        of = f" of {_shown(total, unit)}" if total else ""
        print(f"{label}: {_shown(done, unit)}{of}, {_shown(rate, unit, 1)}/s{left}", file=sys.stderr, flush=True)

    return update


def _shown(units: float, unit: str, digits: int = 0) -> str:
    """A number of units, bytes as MB."""
    return f"{units / 1e6:.1f} MB" if unit == "B" else f"{units:.{digits}f}"
