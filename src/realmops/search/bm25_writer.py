"""Writing the BM25 index of a snapshot, in flat memory.

The words of passages are counted part by part, in worker processes, into files in a folder for work; then the parts are
merged, some words at a time. A killed writer goes on with the parts that it has. The index of an earlier snapshot is a
part, too, of the passages that both have. The same passages give the same bytes, whatever the number of workers and
whatever was there before: words and postings are sorted.

Legend: W words, N postings, n those of some words, R passages of a part, P passages of the snapshot.
"""

import hashlib
import itertools
import multiprocessing
import shutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import atomic_folder, digest_of, make_folder, read_manifest, write_manifest
from realmops.corpus.snapshot_reader import ROWS_PER_BATCH, Snapshot
from realmops.search.bm25 import KIND, Bm25, codes, split_words, stems, stop_words
from realmops.text.flat import FlatArray, load_flat
from realmops.text.languages import ENGLISH

_PART = "part of lexical"
_PASSAGES = 32 * ROWS_PER_BATCH  # of a part
_POSTINGS = 1 << 20  # that are sorted at a time, and those of one word more
_WORDS_OF_PARTS = 16  # whose vocabularies are put together at a time
_PASSAGE_BITS = 31

Passages = NDArray[np.int64]


def write_bm25(
    folder: Path, snapshot: Snapshot, progress: Callable[[int], None] = lambda passages: None, *,
    work: Path | None = None, workers: int = 1, earlier: Snapshot | None = None, wordpieces: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the BM25 index of a snapshot into a folder, whole or not at all; returns its manifest.

    Args:
        progress: called with the number of passages done since the last call.
        work: a folder of this index alone for its parts, from which a later call goes on after a kill; it is the
            caller's to remove. None: a folder that is removed.
        workers: processes that count words; with 1 it happens in this process.
        earlier: a snapshot with an index beside it, whose words are taken over where passages are the same.
        wordpieces: the words are the bodies' wordpieces, whose ``codes`` are their ids; for ``Bm25.search``.
    """
    with atomic_folder(folder) as stage:
        place = stage / "parts" if work is None else work
        make_folder(place)
        known = np.full(len(snapshot), -1) if earlier is None else snapshot.places_in(earlier)
        parts: list[_Part] = []
        if earlier is not None:
            there = np.flatnonzero(known >= 0)
            known[there[snapshot.code_P[there] != earlier.code_P[known[there]]]] = -1  # it is in another language now
            parts.append(_known_part(Bm25.of(earlier), known))
            progress(int((known >= 0).sum()))
        unknown = np.flatnonzero(known < 0)
        borders = range(_PASSAGES, len(unknown), _PASSAGES)
        jobs = [(rows, place / f"part-{n:05d}") for n, rows in enumerate(np.split(unknown, borders)) if len(rows)]
        with _pool(min(workers, len(jobs))) as apply:
            done = apply(partial(_count_part, snapshot.folder, wordpieces), jobs)
            for (rows, path), _ in zip(jobs, done, strict=True):
                parts.append(_Part.read(path))
                progress(len(rows))
        figures = _merge(parts, stage, len(snapshot)) | ({} if wordpieces else _write_languages(snapshot, stage))
        if work is None:
            shutil.rmtree(place)
        return write_manifest(stage, KIND, corpus_hash=snapshot.corpus_hash, passages=len(snapshot), **figures)


def _write_languages(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Which languages the passages are in, for the manifest: nothing where all are English; of several also a file."""
    if snapshot.languages == [ENGLISH]:
        return {}
    if len(snapshot.languages) > 1:
        group_P = sum((snapshot.code_P == code.encode()) * n for n, code in enumerate(snapshot.languages))
        np.save(folder / "groups.npy", np.asarray(group_P, np.uint8))
    return {"languages": snapshot.languages, "common_languages": len(snapshot.common_languages)}


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
    """The words of some passages, in files that are mapped and read some words at a time."""

    word_W: NDArray[np.uint64]  # ascending
    offset_W: NDArray[np.int64]  # the postings of each word, W + 1
    posting_N: NDArray[np.int32]  # passages of the part
    count_N: NDArray[Any]
    length_R: NDArray[np.int32]
    passage_R: NDArray[np.int32]  # their numbers in the snapshot; -1 for those that it does not have

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What ``write`` wrote."""
        return cls(*(np.asarray(load_flat(folder / f"{field.name}.npy")) for field in fields(cls)))

    def write(self, folder: Path) -> None:
        """Write the arrays into a folder."""
        for name, values in vars(self).items():
            np.save(folder / f"{name}.npy", values)

    def postings(self, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Word, passage and count of each posting of the words ``first`` to ``end``, of the snapshot's passages."""
        some = slice(self.offset_W[first], self.offset_W[end])
        word_n = np.repeat(np.arange(first, end), np.diff(self.offset_W[first : end + 1]))
        passage_n = self.passage_R[self.posting_N[some]]
        there_n = passage_n >= 0
        return word_n[there_n], passage_n[there_n], self.count_N[some][there_n]


def _count_part(snapshot: Path, wordpieces: bool, job: tuple[Passages, Path]) -> None:
    """Count the words of some passages into a part, unless it is there."""
    rows, folder = job
    opened = Snapshot.open(snapshot, verify=False)
    spoken = [] if opened.language == ENGLISH else [opened.language]
    key = digest_of([opened.corpus_hash, hashlib.sha256(rows.tobytes()).hexdigest(), wordpieces, *spoken])
    with suppress(ValueError):
        if read_manifest(folder, _PART)["key"] == key:
            return
    texts = (f"{title} {text}" for title, text in opened.rows(rows, "title", "text"))
    languages = opened.code_P[rows].astype(str).tolist()
    part = _counted_wordpieces(opened, rows) if wordpieces else _counted(texts, languages, rows)
    with atomic_folder(folder) as stage:
        part.write(stage)
        write_manifest(stage, _PART, key=key)


def _counted(texts: Iterator[str], languages: Sequence[str], rows: Passages) -> _Part:
    """A part of texts, each with its language."""
    flat, lengths, number = array("i"), array("q"), itertools.count()
    numbers: dict[str, dict[str, int]] = {code: defaultdict(number.__next__) for code in dict.fromkeys(languages)}
    for text, language in zip(texts, languages, strict=True):
        words = split_words(text, language)
        flat.extend(map(numbers[language].__getitem__, words))
        lengths.append(len(words))
    different = next(number)
    code_V, kept_V = np.zeros(different, np.uint64), np.ones(different, bool)
    for language, known in numbers.items():
        code_V[list(known.values())] = codes(stems(list(known), language))
        kept_V[[known[word] for word in stop_words(language) if word in known]] = False
    word_T = np.array(flat, np.int32)
    row_T = np.repeat(np.arange(len(rows)), np.array(lengths, np.int64))
    kept_T = kept_V[word_T]
    word_T, row_T = word_T[kept_T], row_T[kept_T]
    code_W, place = np.unique(code_V, return_inverse=True)
    return _part_of(code_W, place[word_T], row_T, rows)


def _counted_wordpieces(snapshot: Snapshot, rows: Passages) -> _Part:
    """A part of the bodies' wordpieces."""
    bodies = [snapshot.body(row) for row in rows.tolist()]
    code_W, word_T = np.unique(np.concatenate(bodies), return_inverse=True)
    return _part_of(code_W, word_T, np.repeat(np.arange(len(rows)), list(map(len, bodies))), rows)


def _part_of(code_W: NDArray[Any], word_T: NDArray[Any], row_T: NDArray[Any], rows: Passages) -> _Part:
    """A part, from the word and the row of each place of its texts."""
    key_T = np.sort(word_T << _PASSAGE_BITS | row_T)
    first_N = np.flatnonzero(np.diff(key_T, prepend=-1))
    key_N = key_T[first_N]
    return _Part(
        code_W.astype(np.uint64),
        np.searchsorted(key_N >> _PASSAGE_BITS, np.arange(len(code_W) + 1)),
        (key_N & ((1 << _PASSAGE_BITS) - 1)).astype(np.int32),
        np.diff(first_N, append=len(key_T)).astype(np.int32),
        np.bincount(row_T, minlength=len(rows)).astype(np.int32),
        rows.astype(np.int32),
    )


def _known_part(earlier: Bm25, known: Passages) -> _Part:
    """An earlier index as a part; ``known`` is, for each passage, its number in the earlier snapshot, or -1."""
    passages = np.flatnonzero(known >= 0)
    passage_R = np.full(len(earlier), -1, np.int32)
    passage_R[known[passages]] = passages
    return _Part(earlier.word_W, earlier.offset_W, earlier.posting_N, earlier.count_N, earlier.length_P, passage_R)


def _ranges(offset_W: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Consecutive words whose postings fit into memory."""
    wanted = np.arange(0, int(offset_W[-1]), _POSTINGS)
    borders = np.unique(np.append(np.searchsorted(offset_W, wanted), len(offset_W) - 1)).tolist()
    yield from itertools.pairwise(borders)


def _merge(parts: Sequence[_Part], folder: Path, passages: int) -> dict[str, Any]:
    """Write the arrays of an index over all parts; returns its figures."""
    word_W = np.empty(0, np.uint64)
    for first in range(0, len(parts), _WORDS_OF_PARTS):
        word_W = np.unique(np.concatenate([word_W, *(part.word_W for part in parts[first : first + _WORDS_OF_PARTS])]))
    with_word_W = np.zeros(len(word_W), np.int64)
    length_P = np.zeros(passages, np.int32)
    most = 0  # how often a passage has a word
    for part in parts:
        number_W = np.searchsorted(word_W, part.word_W)
        for first, end in _ranges(part.offset_W):
            word_n, _, count_n = part.postings(first, end)
            with_word_W[number_W[first:end]] += np.bincount(word_n - first, minlength=end - first)
            most = max(most, int(count_n.max(initial=0)))
        there_R = part.passage_R >= 0
        length_P[part.passage_R[there_R]] = part.length_R[there_R]
    word_W, with_word_W = word_W[with_word_W > 0], with_word_W[with_word_W > 0]
    offset_W = np.concatenate([[0], np.cumsum(with_word_W)])
    for name, values in (("words", word_W), ("posting_offsets", offset_W), ("lengths", length_P)):
        np.save(folder / f"{name}.npy", values)
    ranges = list(_ranges(offset_W))
    borders = word_W[[first for first, _ in ranges]]
    cuts = [[*np.searchsorted(part.word_W, borders).tolist(), len(part.word_W)] for part in parts]
    with (
        closing(FlatArray(folder / "postings.npy", np.dtype(np.int32))) as postings,
        closing(FlatArray(folder / "counts.npy", np.min_scalar_type(most))) as counts,
    ):
        for number, (first, end) in enumerate(ranges):
            keys, count = [], []
            for part, cut in zip(parts, cuts, strict=True):
                word_n, passage_n, count_n = part.postings(*cut[number : number + 2])
                number_n = np.searchsorted(word_W[first:end], part.word_W[word_n])
                keys.append(number_n << _PASSAGE_BITS | passage_n)
                count.append(count_n)
            key_n = np.concatenate(keys)
            order = np.argsort(key_n, kind="stable")  # which is quick where there are sorted runs
            postings.append((key_n[order] & ((1 << _PASSAGE_BITS) - 1)).astype(np.int32))
            counts.append(np.concatenate(count)[order])
    tokens, longest = int(length_P.sum(dtype=np.int64)), int(length_P.max())
    return {"words": len(word_W), "postings": int(offset_W[-1]), "tokens": tokens, "longest": longest}
