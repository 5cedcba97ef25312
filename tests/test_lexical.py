"""Retrievers by words: BM25, DrQA's TF-IDF by hand, links between passages, and the expansion over them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from asked import TEXTS
from tiny import World, build_world

from realmops.artifacts import atomic_folder
from realmops.corpus.formats import sources
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import train_vocabulary
from realmops.index.lexical import LINKED_SHARE, Bm25, Graph, TfIdf, rank, titled_texts, top
from realmops.index.links import Links


def test_bm25_finds_stems_and_pads_a_small_corpus() -> None:
    ranking = rank(Bm25(TEXTS), ["Which ferry crosses lakes?", "Where was Vell born?"], 6)
    assert ranking.shape == (2, 6)
    assert ranking[:, 0].tolist() == [2, 1]
    assert ranking[:, 4:].tolist() == [[-1, -1], [-1, -1]]
    assert sorted(ranking[0, :4].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("query", ["", "the", "zebra quagga"])
def test_a_query_without_known_words_ranks_nothing_above_anything(query: str) -> None:
    for retriever in (Bm25(TEXTS), TfIdf(TEXTS)):
        assert retriever.scores(query).tolist() == [0.0] * 4
        assert rank(retriever, [query], 3).tolist() == [[0, 1, 2]]


def test_of_equal_scores_the_first_passage_comes_first() -> None:
    scores = np.array([1, 3, 1, 2, 3, 1], np.float32)
    assert top(scores, 5).tolist() == [1, 4, 3, 0, 2]
    assert top(scores, 9).tolist() == [1, 4, 3, 0, 2, 5]


def test_tf_idf_is_drqas_formula() -> None:
    """Three words of which one stands in one of five texts twice, with one pair; idf below 0 counts as 0."""
    texts = ["red ships sail", "red boats", "green boats sail sail", "boats sink", "nothing floats"]
    found = TfIdf(texts).scores("boats sail")
    idf = {n: math.log((5 - n + 0.5) / (n + 0.5)) for n in (1, 2, 3)}
    assert idf[3] < 0
    sail, pair = math.log(2) ** 2 * idf[2] ** 2, math.log(2) ** 2 * idf[1] ** 2
    twice = math.log(2) * math.log(3) * idf[2] ** 2
    assert found.tolist() == pytest.approx([sail, 0.0, twice + pair, 0.0, 0.0], rel=1e-5)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("lexical"))


def test_titles_in_texts_are_links_in_both_directions(world: World) -> None:
    """Passage 8 says Bergen (3) and Karl Lund (2); Jon Vik, its title, stands in 9 and 10."""
    links = Links(world.snapshot)
    assert links.of(8).tolist() == [2, 3, 9, 10]
    assert links.of(9).tolist() == [8]
    assert 8 in links.of(2)
    assert 8 in links.of(3)
    assert links.of(11).tolist() == [3], "Rain: \"It rains in Bergen\"; rains is another word"


def written(folder: Path, records: list[dict[str, object]], block_wordpieces: int = 48) -> Snapshot:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = sources(path, "auto")
    with atomic_folder(folder / "snapshot") as stage:
        vocabulary = train_vocabulary(corpus, size=150, min_count=1)
        write_snapshot(
            corpus, stage, work=folder / "work", vocabulary=vocabulary, block_wordpieces=block_wordpieces
        )
    return Snapshot.open(folder / "snapshot")


def test_links_that_documents_carry_come_before_titles(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"title": "A", "text": "Nothing about it.", "links": ["C (film)", "Unknown"]},
        {"title": "B", "text": "This names A in words."},
        {"title": "C", "text": "A third text."},
    ]
    links = Links(written(tmp_path, records))
    assert [links.of(p).tolist() for p in range(3)] == [[2], [], [0]]


def test_passages_of_one_document_are_linked_and_all_of_a_linked_one(tmp_path: Path) -> None:
    long = "One river runs here. Two bridges cross it. Three mills stand there."
    records: list[dict[str, object]] = [{"title": "Vale", "text": long}, {"title": "Sun", "text": "Seen from Vale."}]
    snapshot = written(tmp_path, records, block_wordpieces=18)
    assert len(snapshot) > 2
    links, last = Links(snapshot), len(snapshot) - 1
    assert links.of(0).tolist() == list(range(1, last + 1))
    assert links.of(last).tolist() == list(range(last))


def test_a_corpus_without_links_has_none(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"title": "", "text": "One text."}, {"title": "", "text": "Two texts."}]
    assert Links(written(tmp_path, records)).of(0).tolist() == []


def test_the_graph_adds_a_share_of_the_best_linked_seed(world: World) -> None:
    texts = titled_texts(world.snapshot)
    bm25, links = Bm25(texts), Links(world.snapshot)
    query = "Who built The Star?"
    own, found = bm25.scores(query), Graph(bm25, links).scores(query)
    for passage in range(12):
        linked = [own[other] for other in range(12) if passage in links.of(other)]
        assert found[passage] == pytest.approx(own[passage] + LINKED_SHARE * max(linked, default=0.0))
    assert own[9] == own.max(), "The Star"
    assert found[8] == pytest.approx(own[8] + LINKED_SHARE * own[9]), "Jon Vik is named in it"
