"""Search without answers: at the terminal, over HTTP, with filters that hide passages."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import small_project
import torch
from small_project import cli

from realmops.answering import metadata_filters
from realmops.answering.metadata_filters import MetadataFilters
from realmops.answering.passage_search import format_passages, highlights
from realmops.commands.search import parse_filter
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.retriever import FusionWeights
from realmops.opening import open_search
from realmops.search.approximate import ApproximateIndex, Recipe
from realmops.search.bm25 import stems
from realmops.search.exact import multi_vector_index

PEOPLE = ("Anna Berg", "Karl Lund", "Maria Holm", "Jon Vik")
RIVER = "the book about the river in Oslo"


def write_documents(path: Path) -> Path:
    """Write forty documents with fields; all share words, and each has a word that no other has."""
    records: list[dict[str, Any]] = []
    for n in range(40):
        name = f"{PEOPLE[n % 4]} {n}"
        text = f"{name} wrote a book about the river in 19{50 + n}. Item{n} was built by {name} in Oslo."
        records.append({"id": f"d{n}", "title": name, "text": text, "year": 1950 + n, "team": "ab"[n % 2]})
        if n % 5 == 0:
            records[-1]["tags"] = ["old", f"t{n}"]
    return small_project.write_json_lines(path, records)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained nothing, without a reader."""
    folder = tmp_path_factory.mktemp("searched")
    small_project.write_project(folder, retriever={"hybrid": True})
    write_documents(folder / "documents.jsonl")
    params = folder / "params.yaml"
    assert cli("run", "snapshot", "--params", params, "--root", folder).exit_code == 0
    by_words = search(folder, "Item7")
    assert (ids(by_words), by_words["passages"][0]["embeddings"]) == (["d7"], None)
    changes = "--preset", "untrained", "--set", "reader.init=none"
    result = cli("run", "all", "--params", params, "--root", folder, *changes)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def opened(root: Path) -> Any:
    return open_search(root, small_project.Quiet())


def search(root: Path, query: str, *words: str) -> dict[str, Any]:
    result = cli("search", query, "--root", root, "--json", *words)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def ids(record: dict[str, Any]) -> list[str]:
    return [passage["document_id"] for passage in record["passages"]]


def where_options(*conditions: str) -> list[str]:
    return [word for condition in conditions for word in ("--where", condition)]


def test_a_hit_has_its_fields_its_place_and_the_words_of_the_query(root: Path) -> None:
    record = search(root, "Who built Item7?", "-k", "5")
    first = record["passages"][0]
    assert (len(record["passages"]), first["document_id"]) == (5, "d7")
    assert first["extra"] == {"team": "b", "year": 1957}
    shown = [first["text"][start:end] for start, end in first["highlights"]]
    assert {"Item7", "built"} <= {*shown}
    result = cli("search", "Item7", "--root", root, "-k", "1")
    assert "[Item7] was built" in result.stdout
    assert "documents.jsonl, characters 0 to " in result.stdout
    assert "no passages found" in cli("search", "zzzz", "--root", root, "--by", "words").stdout


@pytest.mark.parametrize("by", ["run", "embeddings", "words"])
@pytest.mark.parametrize(
    ("where", "allowed"),
    [
        (["team=a"], lambda n: n % 2 == 0),
        (["year>=1960", "year<1970"], lambda n: 10 <= n < 20),
        (["document_id=d3", "document_id=d4"], lambda n: n in (3, 4)),
        (["tags=old", "team=b"], lambda n: n % 10 == 5),
    ],
)
def test_a_filter_gives_the_best_of_the_allowed_passages(
    by: str, where: list[str], allowed: Any, opened: Any, root: Path
) -> None:
    everything, filters = opened.search(RIVER, 40, by=by), [parse_filter(where)]
    few, whole = (opened.search(RIVER, k, filters, by) for k in (3, 40))
    assert {*ids(whole)} == {f"d{n}" for n in range(40) if allowed(n)}
    assert ids(few) == ids(whole)[:3]
    if by != "run":  # where BM25 counts as a share of the best, and that is another one
        scores = {passage["document_id"]: passage["score"] for passage in everything["passages"]}
        for passage in whole["passages"]:
            assert passage["score"] == pytest.approx(scores[passage["document_id"]], abs=1e-4)
    assert ids(search(root, RIVER, "--by", by, "-k", "3", *where_options(*where))) == ids(few)


def test_the_best_passage_is_the_same_however_many_are_returned(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings and BM25 give a hundred candidates each, since the best by both is often the first by neither."""
    monkeypatch.setattr(opened.retriever, "mixture", FusionWeights(1.0, 1.0))
    for query in (f"{person} {word}" for person in PEOPLE for word in ("wrote Item7", "in 1961", "a book", "built")):
        assert ids(opened.search(query, 1)) == ids(opened.search(query, 40))[:1], query


def test_words_count_as_a_share_of_the_best_allowed_passage(opened: Any) -> None:
    """Item7 is of team b: of team a, the best passage by the other words counts 1."""
    passages = opened.search("Item7 river Jon Item8", 40, [{"team": "a"}])["passages"]
    mixture, best = opened.retriever.mixture, max(passage["words"] for passage in passages)
    assert mixture.lexical > 0
    assert [p["document_id"] for p in passages if p["words"] == best] == ["d8"]
    for passage in passages:
        expected = mixture.dense * passage["embeddings"] + mixture.lexical * passage["words"] / best
        assert passage["score"] == pytest.approx(expected, abs=1e-4)


def test_cached_filters_are_bounded_and_thread_safe(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_filters, "_CACHED_FILTERS", 2)
    monkeypatch.setattr(metadata_filters, "_CACHED_PASSAGES", 60)
    filters = MetadataFilters(opened.snapshot)

    def years(n: int) -> list[int]:
        return filters.passages([{"year": {"gte": 1950 + n, "lt": 1975 + n}}]).tolist()

    with ThreadPoolExecutor(8) as pool:
        results = [*pool.map(years, [*range(12)] * 20)]
    assert results == [[*range(n, min(25 + n, 40))] for n in range(12)] * 20
    assert sum(map(len, filters._cache.values())) <= 60


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
@pytest.mark.parametrize("vectors", [1, 2])
def test_a_filtered_search_is_exact_with_an_approximate_index(kind: str, vectors: int, opened: Any) -> None:
    generator, passages = torch.Generator().manual_seed(0), len(opened.snapshot)
    width = opened.embed(["river"]).shape[1]
    embedding_PX = torch.randn(passages * 8, vectors * width, generator=generator)
    recipe = Recipe(kind, 0, 8 if kind != "hnsw" else 0, 1, 0.0, 10, 0.1)
    index = multi_vector_index(embedding_PX, vectors, lambda rows: ApproximateIndex(rows, recipe))
    approximate = dataclasses.replace(opened, passages=index)
    query_E = opened.embed(["Item7"])[0]
    scores = (embedding_PX.view(-1, vectors, width) @ query_E).amax(1)[:passages] * opened.retriever.scale
    best = sorted(range(5, 35), key=lambda n: -float(scores[n]))[:12]
    record = approximate.search("Item7", 12, [{"year": {"gte": 1955, "lt": 1985}}], "embeddings")
    assert ids(record) == [f"d{n}" for n in best]
    assert [p["embeddings"] for p in record["passages"]] == pytest.approx([float(scores[n]) for n in best], abs=1e-4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"query": " "}, "the query is empty"),
        ({"query": "a\ud800"}, "unpaired surrogate"),
        ({"k": 0}, "k is 0; allowed: 1 to 1000"),
        ({"filters": [{"none": 1}]}, "no document has the field 'none'"),
        ({"filters": [{"year": {"from": 1}}]}, "the range of year has from; allowed: gte, gt, lte, lt"),
        ({"filters": [{"year": {}}]}, "the range of year has nothing"),
        ({"filters": [{"year": {"gte": 1, "lt": None}}]}, "lt of year is None"),
        ({"filters": [{"year": {"gte": float("nan")}}]}, "gte of year is nan"),
        ({"filters": [{"year": {"gt": "a\ud800"}}]}, "surrogate"),
        ({"filters": [{"year": [None]}]}, "a filter has the value None"),
        ({"filters": [{"year": [[1]]}]}, r"a filter has the value \[1\]"),
        ({"filters": [{"document_id": {"lt": True}}]}, "lt of document_id is True"),
    ],
)
def test_an_invalid_search_is_refused(request_: dict[str, Any], message: str, opened: Any) -> None:
    with pytest.raises(ValueError, match=message):
        opened.search(**{"query": "river", **request_})


def test_conditions_are_parsed() -> None:
    for conditions, expected in (
        (["year>=1990", "year<2000", "team=a", "team=b"], {"year": {"gte": 1990, "lt": 2000}, "team": ["a", "b"]}),
        (["day>=2020-01-02", "title=x=y"], {"day": {"gte": "2020-01-02"}, "title": ["x=y"]}),
        (
            ["true=true", 'name="7"', "n=NaN", "list=[1]"],
            {"true": [True], "name": ["7"], "n": ["NaN"], "list": ["[1]"]},
        ),
        (["document_id=7"], {"document_id": ["7"]}),
    ):
        assert parse_filter(conditions) == expected
    for wrong in (["year=1990", "year>=1980"], ["year>=1980", "year>=1990"]):
        with pytest.raises(ValueError, match="conflicts with another condition on year"):
            parse_filter(wrong)
    with pytest.raises(ValueError, match="--where 'year': expected FIELD=VALUE"):
        parse_filter(["year"])


# A column of values for each of these fields; documents d0, d1 and so on have them.
COLUMNS: dict[str, list[Any]] = {
    "mixed": [1, True, "1", 1.0, None, {"a": 1}],
    "csv": ["1990", "1990.5", " 2e3 ", "-3", "007", "1,000", "n.d.", "", "NaN", "0x10", "٣", "9" * 5000, "1e999", 7],
    "unknown": ["n.d.", "soon", None, "1990"],
    "name": ["007"],
    "day": ["2020-01-02"],
    "year": [1990],
    "flag": [True],
    "word": ["true"],
}


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> MetadataFilters:
    folder = tmp_path_factory.mktemp("filters")
    records: list[dict[str, Any]] = [{"id": f"d{n}", "title": "A", "text": f"Text {n} is here."} for n in range(14)]
    for field, values in COLUMNS.items():
        for record, value in zip(records, values, strict=False):
            record[field] = value
    small_project.write_project(folder)
    small_project.write_json_lines(folder / "documents.jsonl", records)
    assert cli("run", "snapshot", "--params", folder / "params.yaml", "--root", folder).exit_code == 0
    return MetadataFilters(Snapshot.open(folder / "data/snapshot/corpus"))


@pytest.mark.parametrize(
    ("field", "condition", "passing"),
    [
        ("mixed", 1, [0, 2, 3]),
        ("mixed", True, [1]),
        ("mixed", "1", [2]),
        ("mixed", {"gte": 0}, [0, 2, 3]),
        ("mixed", {"gte": ""}, [2]),
        ("mixed", [True, "1"], [1, 2]),
        ("csv", {"gte": 1990}, [0, 1, 2]),
        ("csv", {"gt": 1990, "lte": 2000}, [1, 2]),
        ("csv", {"lt": 10}, [3, 13]),
        ("csv", 1990.0, [0]),
        ("csv", [2000, "007"], [2, 4]),
        ("csv", "7", []),
        ("csv", {"gte": "n"}, [6, 10]),
        ("unknown", {"gte": 1990, "lt": 2000}, [3]),
        ("word", [], []),
    ],
)
def test_true_is_not_one_and_strings_compare_as_numbers_if_json_writes_them_so(
    field: str, condition: Any, passing: list[int], filters: MetadataFilters
) -> None:
    assert filters.passages([{field: condition}]).tolist() == passing


@pytest.mark.parametrize(
    ("field", "condition", "message"),
    [
        ("name", 7, 'no number to compare with 7: it has "007", for example; compare with a quoted string$'),
        ("day", {"lt": 2021}, 'no number to compare with 2021: it has "2020-01-02"'),
        ("year", {"gte": "1990"}, 'no string to compare with "1990": it has 1990, for example; compare with an unq'),
        ("word", True, 'no boolean to compare with true: it has "true"'),
        ("flag", 1, "no number to compare with 1: it has true, for example; compare with unquoted true or false"),
        ("flag", [1, "true"], "no number to compare with 1: it has true"),
    ],
)
def test_a_condition_that_no_value_can_be_compared_with_is_refused(
    field: str, condition: Any, message: str, filters: MetadataFilters
) -> None:
    with pytest.raises(ValueError, match=f"the field {field} has {message}"):
        filters.passages([{field: condition}])
    with pytest.raises(ValueError, match='no number to compare with 1990: it has "soon"'):  # of d1 alone
        filters.passages([{"document_id": "d1"}, {"unknown": {"gte": 1990}}])


def test_copies_are_one_hit_with_their_places_and_others_follow(tmp_path: Path) -> None:
    small_project.write_project(tmp_path)
    texts = ["The fee in Oslo is nine crowns.", "The fee in  Oslo\nis nine crowns.", "A monthly fee rises in Oslo."]
    documents = [{"id": f"d{n}", "title": f"T{n}", "text": texts[(n > 0) + (n > 8)]} for n in range(10)]
    small_project.write_json_lines(tmp_path / "documents.jsonl", documents)
    assert cli("run", "snapshot", "--params", tmp_path / "params.yaml", "--root", tmp_path).exit_code == 0
    record = search(tmp_path, "crowns fee in Oslo", "-k", "2")
    assert ids(record) == ["d0", "d9"]
    assert [place["document_id"] for place in record["passages"][0]["copies"]] == [f"d{n}" for n in range(1, 9)]
    assert ", also in: T1; T2; T3; " in [*format_passages(record)][2]


def test_highlights_are_of_stems_and_overlaps_are_merged() -> None:
    text = "Builders built a building; rivers flow."
    shown = [text[start:end] for start, end in highlights(text, {"en": stems(["building", "river"])})]
    assert shown == ["building", "rivers"]
    pairs = [highlights("春夏秋冬", {"zh": stems}) for stems in (["春夏", "夏秋"], ["春夏", "秋冬"])]
    assert pairs == [[(0, 3)], [(0, 2), (2, 4)]]


def test_a_hit_is_shown_by_its_window_with_the_most_different_words_of_the_query() -> None:
    text = (
        "A virus spreads here. " * 20
        + "The incubation period of the virus is 5.1 days. "
        + "Afterwards it is cold. " * 20
    )
    for query, expected in (
        (["incubation", "period", "virus"], "The [incubation] [period] of the [virus] is 5.1 days."),
        (["virus"], "A [virus] spreads here."),
        (["absent"], "A virus spreads here."),
    ):
        found = {"text": text, "highlights": highlights(text, {"en": stems(query)}), "title": "T", "score": 1.0}
        _, shown, _ = format_passages({"passages": [{**found, "uri": "f.txt", "start": 0, "end": len(text)}]})
        assert expected in shown
        plain = shown.replace("[", "").replace("]", "").strip(" …")
        assert (plain in text, 250 < len(plain) <= 270) == (True, True)
