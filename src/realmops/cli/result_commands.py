"""Commands that show results and compare runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main
from realmops.console import Console, end_on_sigterm, show


@main.command()
@option.existing_root
def report(root: Path) -> None:
    """Print the tables of results, and the path of the report."""
    from realmops.commands.report import summary

    for text_or_table in summary(root):
        show(text_or_table, columns=100)


@main.command()
@click.argument("sentence", required=False)
@click.option("--answer", metavar="TEXT", help="The words for [MASK] (one [MASK] for all), or an answer to --question.")
@option.flag("--json", help="Print the full record of a sentence or a question as JSON.")
@option.file("--html", help="Also write an HTML page.")
@option.existing_root
@option.repeated("--question", "questions", "ID|TEXT", "The id of a question in results/, or a new question.")
@option.repeated(
    "--failed-at",
    "failures",
    "NAME",
    "Only questions failed at NAME: not_in_corpus, not_retrieved, too_long or reader.",
)
@click.option("--limit", type=click.IntRange(min=0), default=20, help="The maximum number of questions to explain.")
def explain(**options: Any) -> None:
    """Show the passages and spans that each answer is based on.

    Without SENTENCE and --question you see the last evaluation: passages with p(z|x), spans with scores, and where each
    question failed. --question selects one, or queries the fine-tuned model now (always with --answer, --json or
    --html). A SENTENCE with [MASK] queries the pre-trained model, with and without retrieval.
    """
    from realmops.commands.explain import explain

    for text in explain(**options):
        show(text)


@main.command()
@option.question_files
@option.format
@option.options
@option.existing_root
def ceilings(options: option.Options, project: Path, **others: Any) -> Iterable[str]:
    """Measure the share of questions that the corpus can answer.

    The shares of questions in FILES whose answers are in the run's snapshot, in spans of at most
    finetune.answer_wordpieces, and in the top finetune.reader_candidates passages of BM25. Give the presets of the run.
    """
    from realmops.commands.questions import measure_ceilings

    return measure_ceilings(limits=options.finetune, progress=Console().progress, **others)


@main.command("ablate")
@option.repeated("--variant", "variants", "NAME", "Train only this variant.")
@option.count("--seeds", default=1, help="The number of seeds of each variant.")
@option.count("--jobs", default=1, help="The number of processes that train in parallel.")
@option.file(
    "--out", default=Path("runs/ablations"), help="The output folder: trainings, table.md, table.csv and report.html."
)
@option.params
def run_ablations(
    params: Path, presets: Sequence[str], settings: Sequence[str], variants: Sequence[str], seeds: int, jobs: int,
    out: Path,
) -> Iterator[str]:  # fmt: skip
    """Train and compare variants of REALM.

    The variants are listed in variants.yaml, next to the params file or else in the package; the preset ablations/NAME
    has the options that each changes. They start from the preset "ablation", with short trainings, unless you name
    another with --preset. Stages that variants share are trained once.
    """
    from realmops.commands.ablate import Ablation, ablate, read_variants, summary

    names = variants or tuple(read_variants(params))
    ablation = Ablation(params, presets or ("ablation",), settings, names, range(seeds), out)
    end_on_sigterm()
    rows, failures = ablate(ablation, jobs=jobs, report=Console())
    yield from summary(rows, out)
    exit_with(failures)


@main.command()
@click.argument("first", type=option.PATH)
@click.argument("second", type=option.PATH)
def compare(first: Path, second: Path) -> Iterable[str]:
    """Compare two runs, with confidence intervals.

    FIRST and SECOND are folders of runs (--root), or their results folders, evaluated on the same questions. Exact
    match (of the questions of people), recall@5 and, if all questions have judged documents, nDCG@10 are compared by a
    paired bootstrap.
    """
    from realmops.evaluate.compare import compare_runs, format_comparison

    return map(format_comparison, compare_runs(first, second, seed=0))


@main.command()
@option.options
@option.existing_root
@click.option("--name", default="realmops", help="The registered model in MLflow.")
@click.option("--margin", type=click.FloatRange(0, 1), default=0.0, help="The minimum difference to the champion.")
@option.flag("--copy", help="Copy corpus, model and index into MLflow's artifacts too, for other machines.")
def promote(**options: Any) -> Iterator[str]:
    """Register the run in MLflow as champion, if it is better.

    A run is better if its exact match on the same questions is higher by at least the margin, and the confidence
    interval of the difference is above 0. Generated questions are compared by recall@5, relevance judgements alone by
    nDCG@10. A run that is not better gets exit code 1.
    """
    from realmops.commands.promote import promote

    promotion = promote(**options)
    if not promotion.champion:
        exit_with([promotion.message])
    yield promotion.message
