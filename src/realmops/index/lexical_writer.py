"""Writing the BM25 index of a snapshot, in flat memory.

The words of passages are counted part by part, in worker processes, into files in a folder for work; then the parts are
merged, some words at a time. A killed writer goes on with the parts that it has. Passages that an earlier snapshot has,
too, are taken over from its index. The same passages give the same bytes, whatever the number of workers and whatever
was there before: words and postings are sorted.

Legend: W words, N postings, R passages of a part, P passages of the snapshot.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import atomic_folder, digest_of, make_folder, read_manifest, write_manifest
from realmops.corpus.flat import FlatArray, GrowingFile
from realmops.corpus.snapshot import ROWS_PER_GROUP, Snapshot
from realmops.index.lexical import KIND, STOP_WORDS, Bm25, codes, split_words, stems

_PART = "lexical part"
_TYPES: dict[str, np.dtype[Any]] = {
    "words": np.dtype(np.uint64),
    "offsets": np.dtype(np.int64),
    **dict.fromkeys(("postings", "counts", "rows", "lengths"), np.dtype(np.int32)),
}
_PASSAGES = 32 * ROWS_PER_GROUP  # of a part
_POSTINGS = 1 << 20  # that are sorted at a time, and those of one word more
_WORDS_OF_PARTS = 16  # whose vocabularies are put together at a time
_PASSAGE_BITS = 31

Passages = NDArray[np.int64]


def write_bm25(
    folder: Path,
    snapshot: Snapshot,
    progress: Callable[[int], None] | None = None,
    *,
    work: Path | None = None,
    workers: int = 1,
    earlier: Snapshot | None = None,
    wordpieces: bool = False,
) -> dict[str, Any]:
    """Write the BM25 index of a snapshot into a folder, whole or not at all; returns its manifest.

    Args:
        progress: called with the number of passages done since the last call.
        work: a folder of this index alone for its parts, from which a later call goes on after a kill; it is the
            caller's to remove. None: a folder that is removed.
        workers: processes that count words; with 1 it happens in this process.
        earlier: a snapshot with an index beside it, whose words are taken over where passages are the same.
        wordpieces: the words are the bodies' wordpieces, whose ``codes`` are their ids; for ``Bm25.search_codes``.
    """
    with atomic_folder(folder) as stage:
        place = stage / "parts" if work is None else work
        make_folder(place)
        known = np.full(len(snapshot), -1) if earlier is None else snapshot.places_in(earlier)
        parts = []
        if earlier is not None:
            parts.append(_take_over(Bm25.of(earlier), known, place / "earlier"))
            _tell(progress, int((known >= 0).sum()))
        unknown = np.flatnonzero(known < 0)
        borders = range(_PASSAGES, len(unknown), _PASSAGES)
        jobs = [(rows, place / f"part-{n:05d}") for n, rows in enumerate(np.split(unknown, borders)) if len(rows)]
        with _pool(min(workers, len(jobs))) as apply:
            for (rows, path), _ in zip(
                jobs, apply(partial(_count_part, snapshot.folder, wordpieces), jobs), strict=True
            ):
                parts.append(_Part(path))
                _tell(progress, len(rows))
        fields = _merge(parts, stage, len(snapshot))
        if work is None:
            shutil.rmtree(place)
        return write_manifest(stage, KIND, corpus_hash=snapshot.corpus_hash, passages=len(snapshot), **fields)


def _tell(progress: Callable[[int], None] | None, passages: int) -> None:
    if progress is not None:
        progress(passages)


@contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` in so many processes, or in this one."""
    if workers <= 1:
        yield map
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Part:
    """The words of some passages, in files of numbers: read piece by piece, so that hundreds of parts can be merged.

    Files:
        words: uint64 [W] ascending; offsets: int64 [W + 1].
        postings: int32 [N], passages of the snapshot, ascending within each word; counts: int32 [N].
        rows: int32 [R], the part's passages; lengths: int32 [R].
    """

    folder: Path

    def read(self, name: str, start: int = 0, end: int | None = None) -> NDArray[Any]:
        """Entries ``start`` to ``end`` of an array."""
        dtype = _TYPES[name]
        count = -1 if end is None else end - start
        return np.fromfile(self.folder / name, dtype, count, offset=start * dtype.itemsize)

    def most(self) -> int:
        """How often a passage has a word at most."""
        end = (self.folder / "counts").stat().st_size // _TYPES["counts"].itemsize
        starts = range(0, end, _POSTINGS)
        return max((int(self.read("counts", s, min(s + _POSTINGS, end)).max()) for s in starts), default=0)


def _count_part(snapshot: Path, wordpieces: bool, job: tuple[Passages, Path]) -> None:
    """Count the words of some passages into a part, unless it is there."""
    rows, folder = job
    opened = Snapshot.open(snapshot, verify=False)
    key = digest_of([opened.corpus_hash, hashlib.sha256(rows.tobytes()).hexdigest(), wordpieces])
    with suppress(ValueError):
        if read_manifest(folder, _PART)["key"] == key:
            return
    texts = (f"{title} {text}" for title, text in opened.rows(rows, "title", "text"))
    with atomic_folder(folder) as stage:
        arrays = _counted_wordpieces(opened, rows) if wordpieces else _counted(texts, rows)
        for name, values in arrays.items():
            with closing(GrowingFile(stage / name)) as file:
                file.write(values.astype(_TYPES[name]).data)
        write_manifest(stage, _PART, key=key)


class _WordNumbers(dict[str, int]):
    """Words by number, in the order in which they come: first the stop words."""

    def __init__(self) -> None:
        super().__init__((word, number) for number, word in enumerate(STOP_WORDS))

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def _counted(texts: Iterator[str], rows: Passages) -> dict[str, NDArray[Any]]:
    """The arrays of a part."""
    numbers, flat, lengths = _WordNumbers(), array("i"), array("q")
    for text in texts:
        words = split_words(text)
        flat.extend(map(numbers.__getitem__, words))
        lengths.append(len(words))
    word_T = np.array(flat, np.int32) - len(STOP_WORDS)
    row_T = np.repeat(np.arange(len(rows)), np.array(lengths, np.int64))
    kept_T = word_T >= 0
    word_T, row_T = word_T[kept_T], row_T[kept_T]
    code_W, place = np.unique(codes(stems(list(numbers)[len(STOP_WORDS) :])), return_inverse=True)
    return _arrays(code_W, place[word_T], row_T, rows)


def _counted_wordpieces(snapshot: Snapshot, rows: Passages) -> dict[str, NDArray[Any]]:
    """The arrays of a part, of the bodies' wordpieces."""
    bodies = [snapshot.body(row) for row in rows.tolist()]
    code_W, word_T = np.unique(np.concatenate(bodies), return_inverse=True)
    return _arrays(code_W, word_T, np.repeat(np.arange(len(rows)), list(map(len, bodies))), rows)


def _arrays(code_W: NDArray[Any], word_T: NDArray[Any], row_T: NDArray[Any], rows: Passages) -> dict[str, NDArray[Any]]:
    """The arrays of a part, from the word and the row of each place of its texts."""
    key_T = np.sort(word_T << _PASSAGE_BITS | row_T)
    first_N = np.flatnonzero(np.diff(key_T, prepend=-1))
    key_N = key_T[first_N]
    return {
        "words": code_W,
        "offsets": np.searchsorted(key_N >> _PASSAGE_BITS, np.arange(len(code_W) + 1)),
        "postings": rows[key_N & ((1 << _PASSAGE_BITS) - 1)],
        "counts": np.diff(first_N, append=len(key_T)),
        "rows": rows,
        "lengths": np.bincount(row_T, minlength=len(rows)),
    }


def _take_over(earlier: Bm25, known: Passages, folder: Path) -> _Part:
    """An earlier index as a part: its passages by their new numbers, without those that are gone.

    Args:
        known: [P], for each passage its number in the earlier snapshot, or -1.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = np.flatnonzero(known >= 0)
    number = np.full(len(earlier), -1, np.int32)
    number[known[rows]] = rows
    offset = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(closing(GrowingFile(folder / name))) for name in _TYPES}

        def write(name: str, values: NDArray[Any]) -> None:
            files[name].write(values.astype(_TYPES[name]).data)

        write("rows", rows)
        write("lengths", earlier.length_P[known[rows]])
        write("offsets", np.zeros(1))
        for first, end in _ranges(earlier.offset_W):
            start, stop = earlier.offset_W[[first, end]]
            posting_n = number[earlier.posting_N[start:stop]]
            word_n = np.repeat(np.arange(end - first), np.diff(earlier.offset_W[first : end + 1]))
            here = posting_n >= 0
            with_word = np.bincount(word_n[here], minlength=end - first)
            order, posting_n = _sorted_postings(word_n[here], posting_n[here])
            write("words", earlier.word_W[first:end][with_word > 0])
            write("offsets", offset + np.cumsum(with_word[with_word > 0]))
            write("postings", posting_n)
            write("counts", earlier.count_N[start:stop][here][order])
            offset += len(posting_n)
    return _Part(folder)


def _ranges(offset_W: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Consecutive words whose postings fit into memory."""
    wanted = np.arange(0, int(offset_W[-1]), _POSTINGS)
    borders = np.unique(np.append(np.searchsorted(offset_W, wanted), len(offset_W) - 1)).tolist()
    yield from itertools.pairwise(borders)


def _sorted_postings(word_n: NDArray[Any], passage_n: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Passages by word and number, and the order that makes them so."""
    key_n = word_n.astype(np.int64) << _PASSAGE_BITS | passage_n
    order = np.argsort(key_n, kind="stable")  # which is quick where there are sorted runs
    return order, passage_n[order].astype(np.int32)


def _merge(parts: Sequence[_Part], folder: Path, passages: int) -> dict[str, Any]:
    """Write the arrays of an index over all parts; returns its figures."""
    word_W = np.empty(0, np.uint64)
    for first in range(0, len(parts), _WORDS_OF_PARTS):
        some = [part.read("words") for part in parts[first : first + _WORDS_OF_PARTS]]
        word_W = np.unique(np.concatenate([word_W, *some]))
    with_word_W = np.zeros(len(word_W), np.int64)
    length_P = np.zeros(passages, np.int32)
    most = 0
    for part in parts:
        with_word_W[np.searchsorted(word_W, part.read("words"))] += np.diff(part.read("offsets"))
        length_P[part.read("rows")] = part.read("lengths")
        most = max(most, part.most())
    offset_W = np.concatenate([[0], np.cumsum(with_word_W)])
    for name, values in (("words", word_W), ("posting_offsets", offset_W), ("lengths", length_P)):
        with closing(FlatArray(folder / f"{name}.npy", values.dtype)) as file:
            file.append(values)
    ranges = list(_ranges(offset_W))
    borders = word_W[[first for first, _ in ranges]]
    cuts = [_cut(part.read("words"), borders) for part in parts]
    with (
        closing(FlatArray(folder / "postings.npy", np.dtype(np.int32))) as postings,
        closing(FlatArray(folder / "counts.npy", np.min_scalar_type(most))) as counts,
    ):
        for number, (first, end) in enumerate(ranges):
            pieces = [_piece(part, *cut[number : number + 2]) for part, cut in zip(parts, cuts, strict=True)]
            code_n, passage_n, count_n = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            order, passage_n = _sorted_postings(np.searchsorted(word_W[first:end], code_n), passage_n)
            postings.append(passage_n)
            counts.append(count_n[order])
    tokens, longest = int(length_P.sum(dtype=np.int64)), int(length_P.max())
    return {"words": len(word_W), "postings": int(offset_W[-1]), "tokens": tokens, "longest": longest}


def _cut(word_W: NDArray[np.uint64], borders: NDArray[np.uint64]) -> list[int]:
    """Where each range of words begins among these, and where the last one ends."""
    return [*np.searchsorted(word_W, borders).tolist(), len(word_W)]


def _piece(part: _Part, first: int, end: int) -> tuple[NDArray[Any], ...]:
    """Word, passage and count of each posting of the words ``first`` to ``end`` of a part."""
    offset_w = part.read("offsets", first, end + 1)
    start, stop = offset_w[[0, -1]].tolist()
    words = np.repeat(part.read("words", first, end), np.diff(offset_w))
    return words, part.read("postings", start, stop), part.read("counts", start, stop)
