from __future__ import annotations

import numpy as np
import pytest

from realmops.corpus.masking import mask_positions

SCHEMES = ("salient", "random_token", "random_span", "matched_span")
# 20 wordpieces in 14 words: rows 2, 3, 9, 15, 16 and 17 continue one
CONTINUES = np.isin(np.arange(20), [2, 3, 9, 15, 16, 17])
WORDS = [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 10), *((i, i + 1) for i in range(10, 14))]
WORDS += [(14, 18), (18, 19), (19, 20)]


def draw(
    scheme: str, seed: int, salient: tuple[int, int] = (4, 7), limit: int = 10, length: int = 20
) -> list[int]:
    continues = CONTINUES[:length]
    found = mask_positions(scheme, np.random.default_rng(seed), salient, continues, limit)
    assert found.tolist() == sorted(set(found.tolist())), "sorted, each once"
    assert 1 <= len(found) <= limit
    assert found.min() >= 0
    assert found.max() < len(continues)
    return [int(i) for i in found]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_seeds_give_equal_masks(scheme: str) -> None:
    assert draw(scheme, 7) == draw(scheme, 7)
    if scheme != "salient":
        assert len({tuple(draw(scheme, seed)) for seed in range(30)}) > 5


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


def test_random_span_prefers_no_place() -> None:
    """Both halves of a long sentence are masked equally often."""
    counts = np.zeros(400)
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        counts[mask_positions("random_span", rng, (0, 1), np.zeros(400, dtype=bool), 15)] += 1
    assert counts[10:200].sum() / counts[200:390].sum() == pytest.approx(1, abs=0.05)


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
        found = mask_positions("random_span", np.random.default_rng(seed), (0, 1), continues, words)
        single += (found[-1] - found[0] == words - 1) / 3000
    # 0.776, 0.339 and 0.030; piled up at 10 it would be 0.8, 0.41 and 0.134
    assert single == pytest.approx(share[words - 1 :].sum(), abs=0.02)


@pytest.mark.parametrize("salient", [(4, 7), (0, 1), (17, 20), (0, 20)])
def test_matched_span_is_the_salient_mask_moved_round(salient: tuple[int, int]) -> None:
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
