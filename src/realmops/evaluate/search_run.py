"""Files in TREC's formats: the documents that a search ranks for the questions of a file, and those of ``evaluate``."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from realmops import __version__, artifacts
from realmops.answering.metadata_filters import Where
from realmops.answering.passage_search import PassageQuery, PassageSearch, RankBy
from realmops.evaluate.exact_match import RESAMPLES
from realmops.evaluate.predictions import RESULTS
from realmops.evaluate.ranking_measures import (
    DEPTH,
    MEASURES,
    TREC,
    measure_run,
    passage_depth,
    rank_documents,
    ranking_metrics,
    write_trec,
)
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import read_search_questions
from realmops.questions.relevance import RelevantPassages

KIND = "trec"


def rank_file(
    search: PassageSearch,
    file: Path,
    folder: Path,
    filters: Sequence[Where],
    by: RankBy,
    progress: Callable[[str, int], Callable[[int], None]],
) -> Iterator[str]:
    """Write TREC files of the best documents for the questions of a file; yield lines with the measures, if judged."""
    artifacts.check_replaceable(folder, KIND)
    questions = read_search_questions(file)
    if not questions:
        raise ValueError(f"{file}: no questions found; give a question file, or the queries.jsonl of a BEIR folder")
    relevant, sources = RelevantPassages(search.snapshot), SourcePassages(search.snapshot)
    depth = max(DEPTH, passage_depth(relevant.largest_documents))
    bar = progress("questions", len(questions))
    run = {}
    for question in questions:
        excluded = sources.of(question)
        ids = search.rank([PassageQuery(question.question, depth, filters, by)])[0][0].tolist()
        run[question.id] = rank_documents((p for p in ids if p not in excluded), relevant.document_of)
        bar(1)
    qrels = relevant.qrels(questions)
    with artifacts.atomic_folder(folder, KIND) as out:
        write_trec(out, questions, qrels, {"": run})
        artifacts.write_manifest(out, KIND, realmops=__version__, model=search.about)
    yield f"{len(run)} questions: up to {DEPTH} documents of each in {folder / 'run.txt'}"
    if qrels:
        yield f"{len(qrels)} of them have relevance judgements, in {folder / 'qrels.txt'}; with 95 % intervals:"
        figures = ranking_metrics(measure_run(qrels, run), prefix="", seed=0, resamples=RESAMPLES)
        for name, measure in MEASURES.items():
            yield f"  {measure}: {figures[name]:.3f} ({figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f})"


def export_trec(folder: Path, root: Path, kind: str) -> str:
    source = root / RESULTS / TREC
    if not source.is_dir():
        raise ValueError(
            f"{source} does not exist: test questions without judged documents (relevant, passage_id) have no run; "
            "rank them by 'realmops search --from FILE --run FOLDER'"
        )
    with artifacts.atomic_folder(folder, kind) as out:
        shutil.copytree(source, out, dirs_exist_ok=True)
        artifacts.write_manifest(out, kind, format=KIND, realmops=__version__)
    return f"{', '.join(sorted(path.name for path in source.iterdir()))}: written to {folder}"
