"""Time to quality: minutes until the answers to the dev questions are so good, and where the minutes go.

    realmops public-data squad ner    # the files that the preset squad names, into data/public
    python benchmarks/quality.py --preset squad --set run.threads=1 --levels .20 .30 --out runs/quality

One run of every stage in this process, with tracking off. While fine-tuning trains the reader, all dev questions are
answered some times (--looks), with the weights of that moment; what this takes is left out of all times, and the
weights become the same as without it. A level is reached with the first of these looks at which exact match is at least
so high. The weight of f(x, z) beside a span's score is fitted when the training has ended, so the end can be above the
last look. Shown are seconds by the clock and of the processor (child processes included, once they have ended), for
each stage and for the parts that it reports its progress on. Writes OUT/quality.json; what is in --root already is made
again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from against import machine, write

from realmops.options import Options
from realmops.progress import SilentReport

Seconds = tuple[float, float]
"""By the clock, and of the processor."""

LEVELS = (0.2, 0.3)


@dataclass
class Watch:
    """Seconds since it was made, without those of what is left out."""

    left_out: Seconds = (0.0, 0.0)
    start: Seconds = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.start = self._now()

    def read(self) -> Seconds:
        """The seconds so far."""
        now, start, out = self._now(), self.start, self.left_out
        return now[0] - start[0] - out[0], now[1] - start[1] - out[1]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what happens inside."""
        before = self._now()
        yield
        now = self._now()
        self.left_out = (self.left_out[0] + now[0] - before[0], self.left_out[1] + now[1] - before[1])

    @staticmethod
    def _now() -> Seconds:
        times = os.times()
        return time.perf_counter(), times.user + times.system + times.children_user + times.children_system


@dataclass
class Parts(SilentReport):
    """A report that keeps how long each of its bars took, from its start to the last unit."""

    watch: Watch
    of_bar: dict[str, Seconds] = field(default_factory=dict)

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """A bar that is not shown."""
        start, before = self.watch.read(), self.of_bar.get(label, (0.0, 0.0))

        def tick(units: int) -> None:
            now = self.watch.read()
            self.of_bar[label] = (before[0] + now[0] - start[0], before[1] + now[1] - start[1])

        return tick


@dataclass(frozen=True)
class Look:
    """Exact match on the dev questions after some steps of fine-tuning."""

    step: int
    seconds: Seconds  # of all stages so far
    em: float


def look_steps(steps: int, looks: int) -> set[int]:
    """After which steps the dev questions are answered: evenly spread, the last one included."""
    return {round(steps * n / looks) for n in range(1, looks + 1)}


def reached(looks: Sequence[Look], level: float) -> Seconds | None:
    """The seconds after which exact match is at least ``level`` for the first time."""
    return next((look.seconds for look in looks if look.em >= level), None)


@contextmanager
def looking(watch: Watch, questions: Sequence[Any], count: int, found: list[Look], log: Callable[[str], None]) -> Any:
    """Let fine-tuning stop some times to answer the questions."""
    from realmops.evaluate.exact_match import is_exact_match
    from realmops.options import epoch_steps
    from realmops.stages import finetune as stage
    from realmops.train.reader_training import ReaderTrainer

    def seen(train: Callable[..., Any]) -> Callable[..., Any]:
        def with_looks(context: Any, model: Any, lessons: Sequence[Any], options: Any) -> Any:
            at, done = look_steps(epoch_steps(len(lessons), options.batch_size, options.epochs), count), 0

            def tick(units: int) -> None:
                nonlocal done
                context.progress(units)
                done += units
                if units and done in at:
                    seconds = watch.read()
                    with watch.stopped():
                        answers = model.answer(questions, ranked=1)
                        right = [is_exact_match(answer.text, q) for answer, q in zip(answers, questions, strict=True)]
                        found.append(Look(done, seconds, sum(right) / len(right)))
                        log(f"step {done:,}, {minutes(seconds)} minutes: EM {found[-1].em:.3f}")

            return train(replace(context, progress=tick), model, lessons, options)

        return with_looks

    train = ReaderTrainer.train

    def train_reader(trainer: ReaderTrainer, context: Any, *rest: Any) -> Any:
        return seen(lambda context, _, *rest: train(trainer, context, *rest))(context, trainer.base, *rest)

    with (
        mock.patch.object(stage, "finetune", seen(stage.finetune)),
        mock.patch.object(ReaderTrainer, "train", train_reader),
    ):
        yield


def run(values: Options, project: Path, root: Path, looks: int, log: Callable[[str], None]) -> dict[str, Any]:
    """All stages from nothing: seconds of each with those of its parts, the looks, and the end's dev figures."""
    from realmops.process import configure_process
    from realmops.questions.question_sets import read_questions
    from realmops.stages import STAGES
    from realmops.stages.check_inputs import check_inputs
    from realmops.stages.runner import run_stage

    check_inputs(STAGES, values, project, root)
    configure_process(values.run.threads)
    dev = read_questions([project / values.questions.dev])
    watch, found, stages = Watch(), list[Look](), {}
    with looking(watch, dev, looks, found, log):
        for name in STAGES:
            parts, start = Parts(watch), watch.read()
            metrics = run_stage(name, values, project=project, root=root, report=parts, force=True)
            end = watch.read()
            stages[name] = {"seconds": (end[0] - start[0], end[1] - start[1]), "parts": parts.of_bar}
            log(f"{name}: {end[0] - start[0]:.0f} s")
            if name == "finetune":
                ready = {"seconds": end, "em": metrics["dev_em"]}
    return {
        "questions": len(dev),
        "stages": stages,
        "looks": [vars(look) for look in found],
        "ready": ready,
    }


def minutes(seconds: Seconds) -> str:
    """By the clock, and of the processor."""
    return f"{seconds[0] / 60:.1f} ({seconds[1] / 60:.1f})"


def tables(result: Mapping[str, Any], levels: Sequence[float]) -> str:
    """The levels with their minutes, the looks, and the seconds by stage and part, as Markdown."""
    looks, ready = [Look(**look) for look in result["looks"]], result["ready"]
    lines = [f"| dev EM ({result['questions']:,} questions) | minutes from the start (of the processor) |", "|---|---|"]
    for level in levels:
        seconds = reached(looks, level)
        lines.append(f"| {level:.2f} | {'not reached' if seconds is None else minutes(seconds)} |")
    lines.append(f"| {ready['em']:.3f}, with fine-tuning at its end | {minutes(ready['seconds'])} |")
    lines += ["", f"| step of fine-tuning | {' | '.join(f'{look.step:,}' for look in looks)} |"]
    lines.append("|" + "---|" * (len(looks) + 1))
    lines.append(f"| minutes | {' | '.join(minutes(look.seconds) for look in looks)} |")
    lines.append(f"| dev EM | {' | '.join(f'{look.em:.3f}' for look in looks)} |")
    lines += ["", "| stage | seconds | of the processor | its parts |", "|---|---|---|---|"]
    for name, stage in result["stages"].items():
        wall, processor = stage["seconds"]
        longest = sorted(stage["parts"].items(), key=lambda part: -part[1][0])
        parts = ", ".join(f"{label} {seconds[0]:.0f}" for label, seconds in longest if seconds[0] >= 0.5)
        lines.append(f"| {name} | {wall:.0f} | {processor:.0f} | {parts} |")
    whole = [sum(stage["seconds"][n] for stage in result["stages"].values()) for n in (0, 1)]
    return "\n".join([*lines, f"| all | {whole[0]:.0f} | {whole[1]:.0f} | |"])


def main() -> None:
    """Run, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--preset", action="append", default=[], help="as of realmops run; without it squad")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="of exact match (%(default)s)")
    parser.add_argument("--looks", type=int, default=16, help="times that the dev questions are answered (%(default)s)")
    parser.add_argument("--root", type=Path, help="where the stages write; without it a folder that is removed")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of quality.json (%(default)s)")
    arguments = parser.parse_args()
    if arguments.looks < 1:
        parser.error(f"--looks is {arguments.looks}; it must be 1 or more")

    from realmops import config

    presets = [config.preset_path(name, arguments.params) for name in arguments.preset or ["squad"]]
    settings = [*arguments.settings, "tracking.enabled=false"]
    values = config.load_params(arguments.params, presets=presets, settings=settings)
    begun = machine()
    with tempfile.TemporaryDirectory(prefix="realmops-") as folder:
        root = arguments.root or Path(folder)
        result = run(values, arguments.params.parent, root, arguments.looks, lambda line: print(line, flush=True))
    print(f"\n{tables(result, arguments.levels)}")
    write(arguments.out / "quality.json", {"machine": begun, **result})


if __name__ == "__main__":
    main()
