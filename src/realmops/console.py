"""Console output of the command line: progress bars on a terminal, plain lines elsewhere, one message per error."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from realmops.stages import HEADLINE_METRICS

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_SECONDS = 10.0  # between progress lines without a terminal
STOPPED = " stopped; run the same command again: stages are skipped or resume from their checkpoints"


class Console:
    """A ``stages.Report`` on standard error; metrics of a finished stage go to standard output."""

    def log(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        print(f"warning: {message}", file=sys.stderr, flush=True)

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """Start a progress bar or plain lines; ``total`` is 0 if unknown, and the unit ``"B"`` is shown as MB."""
        return _bar(label, total, unit) if sys.stderr.isatty() else _plain(label, total, unit)

    def metrics(self, name: str, metrics: Mapping[str, Any], file: Path | None = None) -> None:
        """Print the metrics of a finished stage on one line: the headline metrics if ``file`` contains all."""
        chief = [key for key in HEADLINE_METRICS.get(name, ()) if key in metrics] if file else []
        shown = [
            f"{key}={metrics[key]:.4g}" if isinstance(metrics[key], float) else f"{key}={metrics[key]}"
            for key in chief or metrics
        ]
        suffix = f"; all {len(metrics)} figures are in {file}" if chief else ""
        print(f"{name}: {', '.join(shown)}{suffix}", flush=True)


def show(text: str | Table, columns: int = 120) -> None:
    """Print text unchanged, or a table at the width of the terminal (``columns`` without one)."""
    if isinstance(text, str):
        print(text, flush=True)
        return
    from rich.console import Console as Screen

    Screen(width=None if Screen().is_terminal else columns).print(text)


def end_on_sigterm() -> None:
    """Raise SystemExit on SIGTERM, so that partial files are removed and child processes stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise KeyboardInterrupt, but end at once during an import, which may swallow an exception."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"realmops:{STOPPED}\n".encode())
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exit with one line on errors that the user can fix (code 2; TimeoutError: 1) and on Ctrl-C (130)."""
    try:
        yield
    except KeyboardInterrupt:
        _end(STOPPED, 130)
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
        advice = " Free disk space and run the same command again; it resumes." if error.errno == ENOSPC else ""
        _end(f"{name} {error.strerror or error}.{advice}")


def _end(message: str, code: int = 2) -> None:
    print(f"realmops:{message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _bar(label: str, total: int, unit: str) -> Callable[[int], None]:
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": unit, "unit_scale": True} if unit else {}
    bar = tqdm(total=total or None, desc=label, file=sys.stderr, dynamic_ncols=True, mininterval=0.3, **options)

    def update(units: int) -> None:
        bar.update(units)
        if bar.total is not None and bar.n >= bar.total:
            bar.close()

    return update


def _plain(label: str, total: int, unit: str) -> Callable[[int], None]:
    started = last = time.monotonic()
    completed = 0

    def update(units: int) -> None:
        nonlocal completed, last
        completed += units
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and completed != total:
            return
        last = now
        rate = completed / max(now - started, 1e-9)
        left = f", {(total - completed) / max(rate, 1e-9):.0f} s left" if total else ""
        of = f" of {_format(total, unit)}" if total else ""
        print(f"{label}: {_format(completed, unit)}{of}, {_format(rate, unit, 1)}/s{left}", file=sys.stderr, flush=True)

    return update


def _format(units: float, unit: str, digits: int = 0) -> str:
    return f"{units / 1e6:.1f} MB" if unit == "B" else f"{units:.{digits}f}"
