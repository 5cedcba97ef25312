"""Commands that show results, and compare runs."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main
from realmops.console import Console, show


@main.command()
@option.existing_root
def report(root: Path) -> None:
    """Print the tables of results, and where the report is."""
    from realmops.commands.report import summary

    for shown in summary(root):
        show(shown, columns=100)


@main.command()
@click.argument("sentence", required=False)
@click.option("--answer", metavar="TEXT", help="The words for [MASK] (one [MASK] for all), or an answer to --question.")
@option.flag("--json", help="Print everything about a sentence or a question as JSON.")
@option.file("--html", help="Write a page, too.")
@option.flag("--before-after", help='Over the corpus before and after "realmops update".')
@option.existing_root
@option.repeated("--question", "questions", "ID|TEXT", "The id of a question in results/, or any question, asked now.")
@option.repeated(
    "--failed-at", "failures", "NAME", "Only failures at NAME: not_in_corpus, not_retrieved, too_long or reader."
)
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Explain at most so many questions.")
def explain(**given: Any) -> None:
    """Show which passage and span each answer rests on.

    Without SENTENCE and --question it shows the last evaluation: the passages with p(z|x), the probability of passage z
    for question x; the spans with their scores; and where each question failed. --question shows one of these, or asks
    the fine-tuned model now (always with --answer, --json, --html or --before-after).

    A SENTENCE with [MASK] asks the pre-trained model: its guess with and without retrieval, and the utility of each
    passage.
    """
    from realmops.commands.explain import explain

    for shown in explain(**given):
        show(shown, columns=160)


@main.command()
@option.question_files
@option.format
@option.values
@option.existing_root
def ceilings(values: option.Values, project: Path, **given: Any) -> Iterable[str]:
    """Say how many questions the corpus can answer at all.

    FILES have the questions. No model can answer a question whose answer is nowhere in the run's snapshot, or in no
    span that is short enough (finetune.answer_wordpieces). The table also has how many answers are in the first
    passages of BM25 (finetune.reader_candidates). Name the presets of the run.
    """
    from realmops.commands.questions import measure_ceilings
    from realmops.config import parse_section

    limits = parse_section("finetune", values["finetune"])
    return measure_ceilings(limits=limits, progress=Console().progress, **given)


@main.command("ablate")
@option.repeated("--variant", "variants", "NAME", "Only this variant.")
@option.count("--seeds", default=1, help="Seeds of each variant.")
@option.count("--jobs", default=1, help="Stages that run at once.")
@option.file(
    "--out", default=Path("runs/ablations"), help="The folder for trainings, table.md, table.csv and report.html."
)
@option.params
def run_ablations(
    params: Path,
    presets: Sequence[str],
    settings: Sequence[str],
    variants: Sequence[str],
    seeds: int,
    jobs: int,
    out: Path,
) -> Iterator[str]:
    """Train and compare variants of REALM.

    The variants are those of variants.yaml, of the package or next to the params file; the preset ablations/NAME has
    what each changes. They start from the preset "ablation", with small trainings, unless --preset names another.
    Stages that variants share are trained once.
    """
    from realmops.commands.ablate import Ablation, ablate, summary, variants_of

    names = variants or tuple(variants_of(params))
    ablation = Ablation(params, presets or ("ablation",), settings, names, range(seeds), out)
    rows, failures = ablate(ablation, jobs=jobs, report=Console())
    yield from summary(rows, out)
    exit_with(failures)


@main.command()
@click.argument("first", type=option.PATH)
@click.argument("second", type=option.PATH)
def compare(first: Path, second: Path) -> Iterable[str]:
    """Say whether one run is better than another, and how sure.

    FIRST and SECOND are folders of runs (--root), or their results folders. Exact match and recall@5 are compared on
    questions with the same id, text and answers, with intervals by a paired bootstrap.
    """
    from realmops.evaluate.compare import compare, sentence

    return map(sentence, compare(first, second, seed=0))


@main.command()
@option.values
@option.existing_root
@click.option("--name", default="realmops", help="The registered model in MLflow.")
@click.option(
    "--margin", type=click.FloatRange(0, 1), default=0.0, help="How much higher than the champion's its EM must be."
)
@option.flag("--copy", help="Copy corpus, model and index into MLflow's artifacts, instead of their paths.")
def promote(**given: Any) -> Iterator[str]:
    """Register the run in MLflow as champion, if it is better.

    A run is better if its exact match (EM) on the same questions by the same rules is higher by the margin at least,
    and the interval of the difference is above 0. Otherwise the command prints why and ends with exit code 1.
    """
    from realmops.commands.promote import promote

    promotion = promote(**given)
    if not promotion.champion:
        exit_with([promotion.message])
    yield promotion.message
