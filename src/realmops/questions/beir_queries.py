"""Queries and judgements of the benchmark BEIR (Thakur et al. 2021): queries.jsonl and qrels/SPLIT.tsv of a folder."""

import re
from collections.abc import Iterator
from pathlib import Path

from realmops.credentials import refuse_credentials
from realmops.questions.question_files import read_columns
from realmops.questions.question_forms import QuestionRecord
from realmops.readers.beir import ENDINGS, ID, beir_file
from realmops.readers.documents import RawRecord, check_id, check_text, iter_lines, read_json_lines, require_key

_QRELS = "qrels"
_QUERY = re.compile(rb'\s*\{\s*"_id"')


def qrels_files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for ending in ENDINGS for path in (folder / _QRELS).glob(f"*.tsv{ending}"))
    return {path.name.partition(".")[0]: path for path in paths}


def read_judged_queries(folder: Path, qrels: Path) -> Iterator[QuestionRecord]:
    """Yield the queries that a file of judgements names, in its order, with the grades of their documents."""
    grades: dict[str, dict[str, int]] = {}
    place_of: dict[str, str] = {}
    for place, query, document, grade in _judgements(qrels):
        place_of.setdefault(query, place)
        if grades.setdefault(query, {}).setdefault(document, grade) != grade:
            raise ValueError(f"{place}: query {query!r} and document {document!r} have two grades; keep one of them")
    queries = beir_file(folder, "queries.jsonl")
    assert queries is not None, folder
    texts = {query.id: query.question for query in read_queries(queries)}
    for query, relevant in grades.items():
        if query not in texts:
            raise ValueError(
                f"{place_of[query]}: the query {query!r} is not in {queries}; add it there, or remove it here"
            )
        yield QuestionRecord(place_of[query], query, texts[query], [], relevant=relevant)


def has_queries(path: Path) -> bool:
    first = next(iter_lines(path), None)
    return isinstance(first, RawRecord) and _QUERY.match(first.data) is not None


def read_queries(path: Path) -> Iterator[QuestionRecord]:
    for place, record in read_json_lines(path):
        refuse_credentials(record, f"{place}: the query")
        query = check_id(require_key(record, ID, place), place)
        yield QuestionRecord(place, query, check_text(require_key(record, "text", place), "text", place), [])


def _judgements(path: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield (place, query, document, grade) for each line after the header."""
    for place, (query, document, grade) in read_columns(path, 3, "query-id, corpus-id, score"):
        if grade.strip().removeprefix("-").isdecimal():
            yield place, query, document, int(grade)
        elif not place.endswith(":1"):
            raise ValueError(f"{place}: the score is {grade[:100]!r}, expected a whole number")
