from pathlib import Path

import numpy as np
import pytest
from small_world import World, build_world, section

from realmops.corpus import masking
from realmops.corpus.masking import SentencesWithSpans, choose_mask_positions, is_recurring
from realmops.train.masked_sentences import Examples

SCHEMES = ("salient", "random_token", "random_span", "matched_span")
# 20 wordpieces in 14 words: rows 2, 3, 9, 15, 16 and 17 continue one
CONTINUES = np.isin(np.arange(20), [2, 3, 9, 15, 16, 17])
WORDS = [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 10), *((i, i + 1) for i in range(10, 14))]
WORDS += [(14, 18), (18, 19), (19, 20)]


def draw(scheme: str, seed: int, salient: tuple[int, int] = (4, 7), limit: int = 10, length: int = 20) -> list[int]:
    continues = CONTINUES[:length]
    found = choose_mask_positions(scheme, np.random.default_rng(seed), salient, continues, limit)
    assert found.tolist() == sorted(set(found.tolist())), "sorted, each once"
    assert 1 <= len(found) <= limit
    assert found.min() >= 0
    assert found.max() < len(continues)
    return [int(i) for i in found]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [1, 2, 20])
@pytest.mark.parametrize("limit", [1, 10])
def test_bounds_hold_everywhere(scheme: str, length: int, limit: int) -> None:
    for seed in range(50):
        draw(scheme, seed, salient=(length - 1, length), limit=limit, length=length)


def test_salient_masks_the_span_and_nothing_else() -> None:
    assert draw("salient", 0) == [4, 5, 6]
    assert draw("salient", 1, salient=(0, 20), limit=10) == list(range(10)), "at most limit, from the start"


def test_random_token_masks_15_percent_anywhere() -> None:
    """round(0.15 * 20) = 3 rows, each row equally often: 2,000 draws give each about 300."""
    counts = np.zeros(20)
    for seed in range(2000):
        found = draw("random_token", seed)
        assert len(found) == 3
        counts[found] += 1
    assert counts.min() > 230
    assert counts.max() < 370
    assert any(np.diff(draw("random_token", seed)).max() > 1 for seed in range(5)), "no runs"


def test_random_span_masks_whole_words_up_to_15_percent() -> None:
    """Three rows: whole words, of which only the last may be cut, to keep the number."""
    for seed in range(300):
        found = draw("random_span", seed)
        assert len(found) == 3
        broken = [word for word in WORDS if 0 < len(set(range(*word)) & set(found)) < word[1] - word[0]]
        assert len(broken) <= 1
        assert all(word[0] in found for word in broken), "its first wordpieces are masked"


@pytest.mark.parametrize("words", [2, 5, 10])
def test_random_span_lengths_are_spanberts(words: int) -> None:
    """Geometric with p = 0.2 among lengths of 1 to 10 words, mean 3.8; the rest is not piled up at 10.

    With room for ``words`` masks in a sentence of 4,000 words they are one run just when the first span has
    as many words or more (spans that touch are rare).
    """
    share = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)
    assert (share @ np.arange(1, 11)).round(1) == 3.8
    continues = np.zeros(4000, dtype=bool)
    single = 0.0
    for seed in range(3000):
        found = choose_mask_positions("random_span", np.random.default_rng(seed), (0, 1), continues, words)
        single += (found[-1] - found[0] == words - 1) / 3000
    # 0.776, 0.339 and 0.030; piled up at 10 it would be 0.8, 0.41 and 0.134
    assert single == pytest.approx(share[words - 1 :].sum(), abs=0.02)


@pytest.mark.parametrize("salient", [(4, 7), (0, 1), (17, 20), (0, 20)])
def test_matched_span_is_the_salient_mask_shifted(salient: tuple[int, int]) -> None:
    """As many masks in one run, where row 0 follows row 19; every start equally likely."""
    count = min(10, salient[1] - salient[0])
    starts = set()
    for seed in range(400):
        found = draw("matched_span", seed, salient=salient)
        assert len(found) == count == len(draw("salient", seed, salient=salient))
        begins = [i for i in found if (i - 1) % 20 not in found]
        assert len(begins) == 1, "one run on the circle"
        starts.update(begins)
    assert starts == set(range(20))


# ---- spans that stand elsewhere too


def by_brute_force(world: World, row: np.ndarray, limit: int) -> bool:
    """Whether the span stands as whole words in two passages or more and in no more than the limit, one by one."""
    passage, _, _, start, stop = row.tolist()
    run = world.snapshot.body(passage)[start : min(stop, start + limit)].tolist()
    count = 0
    for other in range(len(world.snapshot)):
        body = world.snapshot.body(other).tolist()
        begins = [not world.snapshot.continues_word[token] for token in body]
        begins = [True, *begins[1:], True]
        count += any(
            body[at : at + len(run)] == run and begins[at] and begins[at + len(run)]
            for at in range(len(body) - len(run) + 1)
        )
    return 2 <= count <= masking.MAX_PASSAGES


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("together", [1, 40, 1 << 24])
def test_recurring_spans_are_those_of_brute_force(
    world: World, limit: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when few passages are looked at together."""
    monkeypatch.setattr(masking, "_WORDPIECES_PER_CHUNK", together)
    rows = SentencesWithSpans(world.snapshot, world.spans)[:]
    found = is_recurring(world.snapshot, rows, limit)
    assert found.tolist() == [by_brute_force(world, row, limit) for row in rows]
    if limit == 10:
        names = [world.words(world.snapshot.body(int(row[0]))[row[3] : row[4]]) for row in rows]
        said = sorted({name for name, again in zip(names, found, strict=True) if again})
        assert said == ["1950", "anna berg", "bergen", "jon vik", "karl lund", "maria holm", "norway", "oslo"]
        assert sorted({name for name, again in zip(names, found, strict=True) if not again}) == ["1931", "1972"]


def test_a_part_of_a_word_does_not_recur(tmp_path: Path) -> None:
    """ "Berg" stands in "Bergen" as a wordpiece and nowhere else as a word, until it does."""
    once = (("A", "A Berg is high.", ("Berg",)), ("B", "Bergens is far off.", ("Bergens",)))
    for number, more in enumerate(((), (("C", "The Berg.", ("Berg",)),))):
        folder = tmp_path / str(number)
        folder.mkdir()
        world = build_world(folder, (*once, *more))
        rows = SentencesWithSpans(world.snapshot, world.spans)[:]
        assert is_recurring(world.snapshot, rows, 10).tolist() == [by_brute_force(world, row, 10) for row in rows]
        assert is_recurring(world.snapshot, rows, 10).tolist() == [bool(more), False, *[True] * len(more)]


def test_spans_of_most_passages_do_not_recur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oslo in four passages, twice in one of them, Bergen in two: of each a passage counts once."""
    texts = ("Oslo and Oslo.", "Oslo is cold.", "Oslo and Bergen.", "Bergen, then Oslo.", "Rome.")
    documents = tuple((text, text, (text.split()[0].strip(".,"),)) for text in texts)
    world = build_world(tmp_path, documents)
    rows = SentencesWithSpans(world.snapshot, world.spans)[:]
    for most, expected in ((50, 4), (4, 4), (3, 1), (1, 0)):
        monkeypatch.setattr(masking, "MAX_PASSAGES", most)
        found = is_recurring(world.snapshot, rows, 10)
        assert found.sum() == expected
        assert not found[4], "Rome stands in one passage"


def test_recurring_spans_alone_are_drawn_and_masked(world: World, tmp_path: Path) -> None:
    options = section("pretrain", masking="recurring", reader_wordpieces=60)
    examples = Examples(world.snapshot, world.spans, options)
    rng = np.random.default_rng(0)
    drawn = [examples.draw(rng) for _ in range(2000)]
    masked = {world.words(example.targets) for example in drawn}
    assert masked == {"1950", "anna berg", "bergen", "jon vik", "karl lund", "maria holm", "norway", "oslo"}
    counts = np.bincount([example.passage for example in drawn], minlength=12)
    assert counts.tolist() == pytest.approx([2000 / 12] * 12, abs=60), "passages are uniform, a deviation is 12"
    alone = build_world(tmp_path, (("A", "Anna is in Oslo.", ("Oslo",)), ("B", "Jon is in Rome.", ("Rome",))))
    with pytest.raises(ValueError, match=r"no salient span occurs in a second passage; set pretrain\.masking"):
        Examples(alone.snapshot, alone.spans, options)
