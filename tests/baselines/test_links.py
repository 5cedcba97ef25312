"""Links between passages, and BM25's expansion over them."""

import json
from pathlib import Path

import pytest
from small_world import World, build_snapshot

from realmops.baselines.links import LINKED_SHARE, LinkedBm25, PassageLinks
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25


def linked_corpus(folder: Path, records: list[dict[str, object]], block_wordpieces: int = 48) -> Snapshot:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return build_snapshot(folder, path, block_wordpieces)


def test_titles_in_texts_are_links_in_both_directions(world: World) -> None:
    """Passage 8 says Bergen (3) and Karl Lund (2); Jon Vik, its title, stands in 9 and 10."""
    links = PassageLinks(world.snapshot)
    assert links.of(8).tolist() == [2, 3, 9, 10]
    assert links.of(9).tolist() == [8]
    assert 8 in links.of(2)
    assert 8 in links.of(3)
    assert links.of(11).tolist() == [3], 'Rain: "It rains in Bergen"; rains is another word'


def test_a_title_is_found_in_another_spelling(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"title": "Dvořák", "text": "A composer."},
        {"title": "B", "text": "This is by Dvor\u030ca\u0301k, they say."},
    ]
    assert PassageLinks(linked_corpus(tmp_path, records)).of(0).tolist() == [1]


def test_links_that_documents_carry_come_before_titles(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"title": "A", "text": "Nothing about it.", "links": ["C (film)", "Unknown"]},
        {"title": "B", "text": "This names A in words."},
        {"title": "C", "text": "A third text."},
    ]
    links = PassageLinks(linked_corpus(tmp_path, records))
    assert [links.of(p).tolist() for p in range(3)] == [[2], [], [0]]


def test_passages_of_one_document_are_linked_and_all_of_a_linked_one(tmp_path: Path) -> None:
    long = "One river runs here. Two bridges cross it. Three mills stand there."
    records: list[dict[str, object]] = [{"title": "Vale", "text": long}, {"title": "Sun", "text": "Seen from Vale."}]
    snapshot = linked_corpus(tmp_path, records, block_wordpieces=18)
    assert len(snapshot) > 2
    links, last = PassageLinks(snapshot), len(snapshot) - 1
    assert links.of(0).tolist() == list(range(1, last + 1))
    assert links.of(last).tolist() == list(range(last))


def test_a_corpus_without_links_has_none(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"title": "", "text": "One text."}, {"title": "", "text": "Two texts."}]
    assert PassageLinks(linked_corpus(tmp_path, records)).of(0).tolist() == []


def test_the_graph_adds_a_share_of_the_best_linked_seed(world: World) -> None:
    bm25, links = Bm25.of(world.snapshot), PassageLinks(world.snapshot)
    query = "Who built The Star?"
    own, found = bm25.scores(query), LinkedBm25(bm25, links).scores(query)
    for passage in range(12):
        linked = [own[other] for other in range(12) if passage in links.of(other)]
        assert found[passage] == pytest.approx(own[passage] + LINKED_SHARE * max(linked, default=0.0))
    assert own[9] == own.max(), "The Star"
    assert found[8] == pytest.approx(own[8] + LINKED_SHARE * own[9]), "Jon Vik is named in it"
