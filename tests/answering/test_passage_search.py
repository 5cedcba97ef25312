"""Search without answers: at the terminal, over HTTP, with filters that hide what may not be seen."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import small_project
import torch
from serving import Served, served
from small_project import cli

from realmops.answering import passage_search
from realmops.answering.passage_search import MetadataFilters, PassageSearch, highlights
from realmops.artifacts import MANIFEST, atomic_folder, read_json, write_json, write_manifest
from realmops.commands.open_model import open_search
from realmops.commands.search import parse_filter
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.retriever_files import DESCRIPTION, RETRIEVER_FOLDER
from realmops.search.approximate import FaissIndex, Recipe
from realmops.search.bm25 import stems
from realmops.search.exact import multi_vector_index

PEOPLE = ("Anna Berg", "Karl Lund", "Maria Holm", "Jon Vik")


def documents(path: Path) -> Path:
    """Forty of them with fields; a word in each that all share, and one of its own."""
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
    """A run up to ict: nothing is fine-tuned."""
    folder = tmp_path_factory.mktemp("searched")
    small_project.write_project(folder, retriever={"hybrid": True})
    documents(folder / "documents.jsonl")
    params = folder / "params.yaml"
    assert cli("run", "snapshot", "--params", params, "--root", folder).exit_code == 0
    words_alone = found(folder, "Item7")
    assert [one["document_id"] for one in words_alone["passages"]] == ["d7"]
    assert words_alone["passages"][0]["embeddings"] is None
    for stage in ("tag", "ict"):
        result = cli("run", stage, "--params", params, "--root", folder, "--set", "tag.method=dates")
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def searching(root: Path) -> PassageSearch:
    return open_search(root, small_project.Quiet())


def found(root: Path, query: str, *words: str) -> dict[str, Any]:
    result = cli("search", query, "--root", root, "--json", *words)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def ids(record: dict[str, Any]) -> list[str]:
    return [one["document_id"] for one in record["passages"]]


def test_passages_are_found_as_soon_as_there_is_a_retriever(root: Path, searching: PassageSearch) -> None:
    record = found(root, "Who built Item7?", "-k", "5")
    assert len(record["passages"]) == 5
    first = record["passages"][0]
    assert first["document_id"] == "d7"
    assert record["model"]["stage"] == "ict"
    assert first["extra"] == {"team": "b", "year": 1957}
    assert {"score", "embeddings", "words", "start", "end", "uri", "passage_id", "title", "text"} < first.keys()
    shown = [first["text"][start:end] for start, end in first["highlights"]]
    assert "Item7" in shown
    assert "built" in shown
    kept = [*(root / ".realmops" / "search").iterdir()]
    assert len(kept) == 1
    again = found(root, "Who built Item7?", "-k", "5")
    assert again == record
    assert [*(root / ".realmops" / "search").iterdir()] == kept, "passages are embedded once"


def test_two_who_search_at_the_same_moment_take_nothing_from_each_other(root: Path, tmp_path: Path) -> None:
    """Embeddings of another retriever go; what somebody else is just writing stays."""
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    kept = copy / ".realmops" / "search"
    shutil.rmtree(kept)
    for name in ("of-another", ".at-work"):
        (kept / name).mkdir(parents=True)
    assert found(copy, "Item7", "-k", "1") == found(root, "Item7", "-k", "1")
    assert (kept / ".at-work").is_dir()
    assert not (kept / "of-another").exists()


def test_passages_are_embedded_again_where_the_pooling_alone_is_another(root: Path, tmp_path: Path) -> None:
    """The weights are then the same: as where nothing is trained, and an option is changed between two runs."""
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    before = found(copy, "Item7", "--by", "embeddings")
    final = copy / "models" / "ict"
    manifest = read_json(final / MANIFEST)
    about = read_json(final / RETRIEVER_FOLDER / DESCRIPTION)
    with atomic_folder(final) as stage:
        shutil.copytree(final, stage, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        write_json(
            stage / RETRIEVER_FOLDER / DESCRIPTION, about | {"pooling": "mean" if about["pooling"] == "cls" else "cls"}
        )
        write_manifest(stage, "ict", **{name: manifest[name] for name in ("fingerprint", "sections")})
    after = found(copy, "Item7", "--by", "embeddings")
    shutil.rmtree(copy / ".realmops" / "search")
    assert after == found(copy, "Item7", "--by", "embeddings"), "nothing of before is searched"
    assert [one["score"] for one in after["passages"]] != [one["score"] for one in before["passages"]]


def test_people_see_the_words_in_brackets(root: Path) -> None:
    result = cli("search", "Item7", "--root", root, "-k", "1")
    assert "1. Jon Vik 7" in result.stdout
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
        (["tags=t10"], lambda n: n == 10),
    ],
)
def test_a_filter_gives_what_an_exact_search_of_the_allowed_gives(
    by: str, where: list[str], allowed: Any, searching: PassageSearch, root: Path
) -> None:
    """Not the best of all that happen to be allowed: the best of the allowed."""
    all_of_them = searching.search("the book about the river in Oslo", 40, by=by)  # type: ignore[arg-type]
    wanted = [one for one in ids(all_of_them) if allowed(int(one[1:]))]
    filters = [parse_filter(where)]
    few = searching.search("the book about the river in Oslo", 3, filters, by)  # type: ignore[arg-type]
    whole = searching.search("the book about the river in Oslo", 40, filters, by)  # type: ignore[arg-type]
    assert set(ids(whole)) == {f"d{n}" for n in range(40) if allowed(n)}
    assert ids(few) == ids(whole)[:3]
    if by != "run":  # where BM25 counts as a share of the best, and that is another one
        scores = {one["document_id"]: one["score"] for one in all_of_them["passages"]}
        for one in whole["passages"]:
            assert one["score"] == pytest.approx(scores[one["document_id"]], abs=1e-4)
        assert len(wanted) == len(ids(whole))
    words = [word for one in where for word in ("--where", one)]
    assert ids(found(root, "the book about the river in Oslo", "--by", by, "-k", "3", *words)) == ids(few)


@pytest.mark.parametrize("by", ["run", "embeddings", "words"])
def test_the_first_passages_are_the_first_of_many(by: str, searching: PassageSearch) -> None:
    """The best by embeddings and words together need not be the best by one of them."""
    for query in [f"{name} book river Oslo 19{year}" for name in PEOPLE for year in (51, 62, 77)]:
        many = ids(searching.search(query, 40, by=by))  # type: ignore[arg-type]
        for k in (1, 2, 5):
            assert ids(searching.search(query, k, by=by)) == many[:k]  # type: ignore[arg-type]


def test_words_count_as_a_share_of_the_best_passage_that_the_filter_lets_through(searching: PassageSearch) -> None:
    """Item7 is of team b: it finds nothing among those of team a, whose best by "river" and "Jon" alone counts 1."""
    where, query = {"team": "a"}, "Item7 river Jon Item8"
    record = searching.search(query, 40, [where])
    found = record["passages"]
    assert [one["document_id"] for one in found if one["words"] == max(p["words"] for p in found)] == ["d8"]
    assert searching.search("Item7", 1, by="words")["passages"][0]["words"] > 0
    mixture, best = searching.retriever.mixture, max(one["words"] for one in found)
    assert mixture.lexical > 0
    for one in found:
        by_hand = mixture.dense * one["embeddings"] + mixture.lexical * one["words"] / best
        assert one["score"] == pytest.approx(by_hand, abs=1e-4)


def test_a_range_is_checked_whatever_it_is_compared_with(searching: PassageSearch) -> None:
    for bound in (1900, 1960, 3000):
        with pytest.raises(ValueError, match="lt of year is None"):
            searching.search("x", 1, [{"year": {"gte": bound, "lt": None}}])


def test_many_threads_find_what_one_finds(searching: PassageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """More filters than are remembered, asked for at once."""
    monkeypatch.setattr(passage_search, "_CACHED_FILTERS", 2)
    years = [{"year": {"gte": 1950 + n, "lt": 1960 + n}} for n in range(12)] * 20
    fresh = dataclasses.replace(searching)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda where: ids(fresh.search("river Item7", 40, [where])), years)]
    for where, mine in zip(years[:12], found, strict=False):
        assert mine == ids(searching.search("river Item7", 40, [where]))
        assert {int(one[1:]) for one in mine} == {*range(where["year"]["gte"] - 1950, where["year"]["lt"] - 1950)} & {
            *range(40)
        }
    assert found[:12] * 20 == found


def test_filters_are_remembered_up_to_so_many_passages(
    searching: PassageSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passage_search, "_CACHED_PASSAGES", 60)
    filters = MetadataFilters(searching.snapshot)
    for n in range(10):
        assert len(filters.passages([{"year": {"gte": 1950 + n}}])) == 40 - n
        assert sum(map(len, filters._cache.values())) <= 60


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
@pytest.mark.parametrize("vectors", [1, 2])
def test_a_filter_is_exact_where_the_index_is_not(kind: str, vectors: int, searching: PassageSearch) -> None:
    """A structure that looks at next to nothing still leaves out no passage that the filter lets through."""
    generator, passages = torch.Generator().manual_seed(0), len(searching.snapshot)
    width = searching.embed(["river"]).shape[1]
    embedding_PX = torch.randn(passages * 8, vectors * width, generator=generator)
    lists = 8 if kind != "hnsw" else 0
    recipe = Recipe(kind, 0, lists, 1, 0.0, 10, 0.1)
    index = multi_vector_index(embedding_PX, vectors, lambda rows: FaissIndex(rows, recipe))
    approximate = dataclasses.replace(searching, passages=index)
    where = {"year": {"gte": 1955, "lt": 1985}}
    for query in ("the book about the river", "Item7"):
        query_E = searching.embed([query])[0]
        scores = (embedding_PX.view(-1, vectors, width) @ query_E).amax(1)[:passages] * searching.retriever.scale
        wanted = sorted(range(5, 35), key=lambda n: -float(scores[n]))
        found = approximate.search(query, 12, [where], "embeddings")["passages"]
        assert [one["document_id"] for one in found] == [f"d{n}" for n in wanted[:12]]
        assert [one["embeddings"] for one in found] == pytest.approx([float(scores[n]) for n in wanted[:12]], abs=1e-4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"query": " "}, "the query is empty"),
        ({"query": "a\ud800"}, "unpaired surrogate"),
        ({"k": 0}, "k is 0; allowed: 1 to 1000"),
        ({"filters": [{"nobody": 1}]}, "no document has the field 'nobody'"),
        ({"filters": [{"year": {"from": 1}}]}, "the range of year has from; allowed: gte, gt, lte, lt"),
        ({"filters": [{"year": {}}]}, "the range of year has nothing"),
        ({"filters": [{"year": {"gte": None}}]}, "gte of year is None"),
        ({"filters": [{"year": {"gte": 1, "lt": None}}]}, "lt of year is None"),
        ({"filters": [{"year": {"gte": float("nan")}}]}, "gte of year is nan"),
        ({"filters": [{"year": [None]}]}, "a filter has the value None"),
        ({"filters": [{"year": float("nan")}]}, "a filter has the value nan"),
        ({"filters": [{"year": [[1]]}]}, r"a filter has the value \[1\]"),
        ({"filters": [{"document_id": {"lt": True}}]}, "lt of document_id is True"),
    ],
)
def test_what_cannot_be_searched_is_told(given: dict[str, Any], told: str, searching: PassageSearch) -> None:
    with pytest.raises(ValueError, match=told):
        searching.search(**{"query": "river", **given})


def test_conditions_are_read_from_words() -> None:
    assert parse_filter(["year>=1990", "year<2000", "team=a", "team=b", "title=x=y"]) == {
        "year": {"gte": 1990, "lt": 2000},
        "team": ["a", "b"],
        "title": ["x=y"],
    }
    assert parse_filter(["day>=2020-01-02", "at=12:30", "true=true", 'name="7"', "n=NaN", "none=null", "list=[1]"]) == {
        "day": {"gte": "2020-01-02"}, "at": ["12:30"], "true": [True], "name": ["7"], "n": ["NaN"], "none": ["null"],
        "list": ["[1]"],
    }  # fmt: skip
    assert parse_filter(["document_id=7"]) == {"document_id": ["7"]}
    for wrong in (["year=1990", "year>=1980"], ["year>=1980", "year=1990"], ["year>=1980", "year>=1990"]):
        with pytest.raises(ValueError, match="conflicts with another condition on year"):
            parse_filter(wrong)
    with pytest.raises(ValueError, match="--where 'year': expected FIELD=VALUE"):
        parse_filter(["year"])


def filters_over(folder: Path, *columns: list[Any]) -> MetadataFilters:
    """Over documents d0, d1 and so on. A column has the values of ``field``, more columns those of ``field1`` etc."""
    records: list[dict[str, Any]] = [
        {"id": f"d{n}", "title": "A", "text": f"Text {n} is here."} for n in range(max(map(len, columns)))
    ]
    for number, values in enumerate(columns):
        for record, value in zip(records, values, strict=False):
            record[f"field{number or ''}"] = value
    small_project.write_project(folder)
    small_project.write_json_lines(folder / "documents.jsonl", records)
    assert cli("run", "snapshot", "--params", folder / "params.yaml", "--root", folder).exit_code == 0
    return MetadataFilters(Snapshot.open(folder / "data/snapshot/corpus"))


def test_true_is_not_one_and_a_number_is_no_text(tmp_path: Path) -> None:
    filters = filters_over(tmp_path, [1, True, "1", 1.0, None, {"a": 1}])

    def passing(condition: Any) -> list[int]:
        return filters.passages([{"field": condition}]).tolist()

    assert passing(1) == [0, 2, 3]
    assert passing(True) == [1]
    assert passing("1") == [2]
    assert passing({"gte": 0}) == [0, 2, 3]
    assert passing({"gte": ""}) == [2]
    assert passing([True, "1"]) == [1, 2]


def test_texts_that_are_numbers_compare_as_numbers(tmp_path: Path) -> None:
    """As JSON writes numbers; 007, 1,000, 0x10, a digit of another script and what is too large are names."""
    values = ["1990", "1990.5", " 2e3 ", "-3", "007", "1,000", "n.d.", "", "NaN", "0x10", "٣", "9" * 5000, "1e999", 7]
    filters = filters_over(tmp_path, values)

    def passing(condition: Any) -> list[int]:
        return filters.passages([{"field": condition}]).tolist()

    assert passing({"gte": 1990}) == [0, 1, 2]
    assert passing({"gt": 1990, "lte": 2000}) == [1, 2]
    assert passing({"lt": 10}) == [3, 13]
    assert passing(1990) == passing(1990.0) == [0]
    assert passing([2000, "007"]) == [2, 4]
    assert passing(7) == [13]
    assert passing("7") == []
    assert passing("007") == [4]
    assert passing({"gte": "n"}) == [6, 10], "texts as texts"


UNLIKE: list[tuple[list[Any], Any, str]] = [
    (["n.d.", "soon"], {"gte": 1990}, 'no number to compare with 1990: it has "n.d.", for example; compare with'),
    (["007"], 7, 'no number to compare with 7: it has "007", for example; compare with a quoted string$'),
    (["2020-01-02"], {"lt": 2021}, 'no number to compare with 2021: it has "2020-01-02"'),
    ([1990], {"gte": "1990"}, 'no string to compare with "1990": it has 1990, for example; compare with an unq'),
    ([1990], "1990", 'no string to compare with "1990": it has 1990'),
    (["1990"], {"gte": 1990, "lt": 2000}, ""),
    (["true"], True, 'no boolean to compare with true: it has "true"'),
    ([True], 1, "no number to compare with 1: it has true, for example; compare with unquoted true or false"),
    ([True], [1, "true"], "no number to compare with 1: it has true"),
    (["a"], [1, "b"], ""),
    (["a"], [], ""),
    ([None, {"a": 1}], 1, ""),
]  # values of a field, a condition, what is said of it


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> MetadataFilters:
    return filters_over(tmp_path_factory.mktemp("unlike"), [0], *(values for values, _, _ in UNLIKE))


@pytest.mark.parametrize("number", range(len(UNLIKE)))
def test_a_condition_that_no_value_can_be_compared_with_is_refused(number: int, unlike: MetadataFilters) -> None:
    _, condition, message = UNLIKE[number]
    where = {f"field{number + 1}": condition}
    if not message:
        unlike.passages([where])
        return
    with pytest.raises(ValueError, match=f"the field field{number + 1} has {message}"):
        unlike.passages([where])


def test_a_condition_is_compared_with_what_the_filters_before_let_through(tmp_path: Path) -> None:
    filters = filters_over(tmp_path, ["soon", "1990", "later"])
    assert filters.passages([{"field": {"gte": 1990}}]).tolist() == [1]
    with pytest.raises(ValueError, match='no number to compare with 1990: it has "later"'):
        filters.passages([{"document_id": "d2"}, {"field": {"gte": 1990}}])


def test_a_field_of_a_table_is_compared_with_a_number(tmp_path: Path) -> None:
    """All fields of a CSV file are texts: ``--where year>=1990`` found nothing once, and said nothing."""
    small_project.write_project(tmp_path)
    rows = ["title,text,year,room", "A,Text one is here.,1989,007", "B,Text two is here.,1990,7", "C,Text,2003.5,x"]
    (tmp_path / "documents.csv").write_text("\n".join(rows) + "\n")
    place = ("--params", tmp_path / "params.yaml", "--root", tmp_path)
    made = cli("run", "snapshot", *place, "--set", f"snapshot.documents={tmp_path / 'documents.csv'}")
    assert made.exit_code == 0, made.output

    def titles(*where: str) -> list[str]:
        words = [word for one in where for word in ("--where", one)]
        return sorted(one["title"] for one in found(tmp_path, "text", *words)["passages"])

    assert titles("year>=1990") == ["B", "C"]
    assert titles("year>=1989", "year<2000") == ["A", "B"]
    assert titles("year=1990") == ["B"]
    assert titles("room=7") == ["B"]
    assert titles("room=007") == ["A"]
    refused = cli("search", "text", "--root", tmp_path, "--where", "title>=1990")
    assert (refused.exit_code, "the field title has" in refused.output) == (2, False), "a title is no field"
    refused = cli("search", "text", "--root", tmp_path, "--where", "room=true")
    assert refused.exit_code == 2
    assert 'the field room has no boolean to compare with true: it has "007"' in refused.output


def test_highlights_are_of_stems() -> None:
    text = "Builders built a building; rivers flow."
    shown = [text[start:end] for start, end in highlights(text, {"en": stems(["building", "river"])})]
    assert shown == ["building", "rivers"]


def test_highlights_of_pairs_of_characters_are_one_where_they_overlap() -> None:
    text = "春夏秋冬"
    shown = [highlights(text, {"zh": stems}) for stems in (["春夏", "夏秋"], ["春夏", "秋冬"])]
    assert shown == [[(0, 3)], [(0, 2), (2, 4)]]


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("served")
    small_project.write_project(folder)
    documents(folder / "documents.jsonl")
    small_project.run_all_here(folder / "params.yaml", folder, "tag.method=dates")
    with served(folder) as running:
        yield running, folder


def posted(running: Served, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    code, _, reply = running.call(path, body)
    assert code == status, reply
    return dict(reply)


def test_the_server_finds_what_the_terminal_finds(server: tuple[Served, Path]) -> None:
    running, folder = server
    asked = {"query": "Who built Item7?", "k": 4, "filters": {"team": ["a", "b"], "year": {"gte": 1952}}}
    reply = posted(running, "/v1/search", asked)
    wanted = found(
        folder, "Who built Item7?", "-k", "4", *(w for t in ("team=a", "team=b", "year>=1952") for w in ("--where", t))
    )
    assert reply == small_project.near(wanted)
    assert len(reply["passages"]) == 4
    for wrong, told in (
        ({"query": ""}, "the query is empty"),
        ({"query": "x", "k": 0}, "k: "),
        ({"query": "x", "filters": {"none": 1}}, "no document has the field 'none'"),
        ({"query": "x", "other": 1}, "other: "),
        ({"query": "x", "filters": {"year": float("nan")}}, "a filter has the value nan"),
        ({"query": "x", "filters": {"year": {"lt": float("inf")}}}, "lt of year is inf"),
        ({"query": "x", "filters": {"year": {"gt": "a\ud800"}}}, "surrogate"),
        ({"query": "x" * 2001}, "query: "),
    ):
        assert told in posted(running, "/v1/search", wrong, 422)["error"]["message"]
