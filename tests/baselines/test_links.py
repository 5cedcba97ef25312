"""Links between passages, and BM25's expansion over them."""

import json
from pathlib import Path

import pytest
from small_world import World, build_snapshot

from realmops.baselines.links import LINKED_SHARE, LinkedBm25, PassageLinks
from realmops.search.bm25 import Bm25

LONG = "One river runs here. Two bridges cross it. Three mills stand there."  # several passages


@pytest.mark.parametrize(
    ("records", "links"),
    [
        ([("Dvořák", "A composer."), ("B", "This is by Dvor\u030ca\u0301k, it is read.")], [[1], [0]]),
        (
            [("A", "Nothing.", ["C (film)", "Unknown"]), ("B", "This names A in words."), ("C", "A third text.")],
            [[2], [], [0]],
        ),
        ([("Vale", LONG), ("Sun", "Seen from Vale.")], None),
        ([("", "One text."), ("", "Two texts.")], [[], []]),
    ],
    ids=["another spelling", "given links instead of titles", "all passages of a document", "no title"],
)
def test_links_of_documents(tmp_path: Path, records: list[tuple[str, ...]], links: list[list[int]] | None) -> None:
    lines = [dict(zip(("title", "text", "links"), record, strict=False)) for record in records]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    snapshot = build_snapshot(tmp_path, tmp_path / "d.jsonl", block_wordpieces=18)
    if links is None:
        assert len(snapshot) > 2
        links = [[other for other in range(len(snapshot)) if other != p] for p in range(len(snapshot))]
    found = PassageLinks(snapshot)
    assert [found.of(p).tolist() for p in range(len(snapshot))] == links


def test_titles_in_texts_are_links_in_both_directions(world: World) -> None:
    """Passage 8 names Bergen (3) and Karl Lund (2); Jon Vik, its title, is in 9 and 10."""
    links = PassageLinks(world.snapshot)
    assert [links.of(p).tolist() for p in (8, 9)] == [[2, 3, 9, 10], [8]]
    assert 8 in links.of(2)
    assert links.of(11).tolist() == [3], 'Rain: "It rains in Bergen"; rains is another word'


def test_linked_bm25_adds_a_share_of_the_best_linked_seed(world: World) -> None:
    bm25, links = Bm25.of(world.snapshot), PassageLinks(world.snapshot)
    query = "Who built The Star?"
    own, scores = bm25.scores(query), LinkedBm25(bm25, links).scores(query)
    for passage in range(12):
        linked = [own[other] for other in range(12) if passage in links.of(other)]
        assert scores[passage] == pytest.approx(own[passage] + LINKED_SHARE * max(linked, default=0.0))
    assert scores[8] == pytest.approx(own[8] + LINKED_SHARE * own.max()), "Jon Vik is named in The Star"
