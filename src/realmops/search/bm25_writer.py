"""Write the BM25 index of a snapshot in constant memory.

Worker processes count the words of the passages, part by part, into files of a work folder; then the parts are merged,
a range of words at a time. An interrupted writer resumes with the parts that are complete. The index of an earlier
snapshot serves as the part of the passages that both share. The same passages give the same bytes, whatever the number
of workers and the earlier parts: words and postings are sorted.

Legend: W words, N postings, n postings of a range of words, R passages of a part, P passages of the snapshot.
"""

import hashlib
import itertools
import multiprocessing
import shutil
import signal
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
from realmops.corpus.languages import ENGLISH, NORMAL_FORM
from realmops.corpus.npy_files import NpyWriter, load_npy
from realmops.corpus.snapshot_reader import ROWS_PER_BATCH, Snapshot
from realmops.search.bm25 import KIND, Bm25, split_words, stem_hashes, stems, stop_words

_PART = "part of lexical"
_PASSAGES = 32 * ROWS_PER_BATCH  # per part
_POSTINGS = 1 << 20  # sorted at a time, plus those of one word
_MERGED_PARTS = 16  # parts whose vocabularies are merged at a time
_PASSAGE_BITS = 31

Passages = NDArray[np.int64]


def write_bm25(
    folder: Path, snapshot: Snapshot, progress: Callable[[int], None] = lambda passages: None, *,
    work: Path | None = None, workers: int = 1, earlier: Snapshot | None = None, wordpieces: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the BM25 index of a snapshot into a folder atomically; return its manifest.

    Args:
        folder: the folder to write.
        snapshot: its passages.
        progress: called with the number of passages done since the last call.
        work: folder for this index's parts, from which an interrupted call resumes; the caller removes it. None: a
            folder that is removed at the end.
        workers: number of counting processes; 1 counts in this process.
        earlier: a snapshot with an index next to it, whose counts are reused for unchanged passages.
        wordpieces: index the wordpieces of the bodies, with their ids as keys, for ``Bm25.search``.
    """
    with atomic_folder(folder) as stage:
        parts_folder = stage / "parts" if work is None else work
        make_folder(parts_folder)
        if earlier is not None and Bm25.of(earlier).normal_form != NORMAL_FORM:
            earlier = None  # its words are others
        earlier_row_P = np.full(len(snapshot), -1) if earlier is None else snapshot.match_passages(earlier)
        parts: list[_Part] = []
        if earlier is not None:
            shared_rows = np.flatnonzero(earlier_row_P >= 0)
            has_changed = snapshot.code_P[shared_rows] != earlier.code_P[earlier_row_P[shared_rows]]
            earlier_row_P[shared_rows[has_changed]] = -1  # words depend on the language
            parts.append(_part_of_earlier(Bm25.of(earlier), earlier_row_P))
            progress(int((earlier_row_P >= 0).sum()))
        new_rows = np.flatnonzero(earlier_row_P < 0)
        borders = range(_PASSAGES, len(new_rows), _PASSAGES)
        row_ranges = enumerate(np.split(new_rows, borders))
        jobs = [(rows, parts_folder / f"part-{n:05d}") for n, rows in row_ranges if len(rows)]
        with _worker_pool(min(workers, len(jobs))) as apply:
            results = apply(partial(_count_part, snapshot.folder, wordpieces), jobs)
            for (rows, path), _ in zip(jobs, results, strict=True):
                parts.append(_Part.read(path))
                progress(len(rows))
        figures = _merge(parts, stage, len(snapshot)) | ({} if wordpieces else _write_languages(snapshot, stage))
        if work is None:
            shutil.rmtree(parts_folder)
        figures = {"normal_form": NORMAL_FORM, "passages": len(snapshot), **figures}
        return write_manifest(stage, KIND, corpus_hash=snapshot.corpus_hash, **figures)


def _write_languages(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Return the manifest's language entries, none if all are English; write ``groups.npy`` if there are several."""
    if snapshot.languages == [ENGLISH]:
        return {}
    if len(snapshot.languages) > 1:
        group_P = sum((snapshot.code_P == code.encode()) * n for n, code in enumerate(snapshot.languages))
        np.save(folder / "groups.npy", np.asarray(group_P, np.uint8))
    return {"languages": snapshot.languages, "common_languages": len(snapshot.common_languages)}


@contextmanager
def _worker_pool(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide ``map`` over ``workers`` processes, or in this process."""
    if workers <= 1:
        yield map
        return
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: for the parent
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignore) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Part:
    """Word counts of some passages, in memory-mapped files that are read a range of words at a time."""

    word_W: NDArray[np.uint64]  # ascending
    offset_W: NDArray[np.int64]  # the postings of each word, W + 1
    posting_N: NDArray[np.int32]  # passages, as rows of the part
    count_N: NDArray[Any]
    length_R: NDArray[np.int32]
    passage_R: NDArray[np.int32]  # their rows in the snapshot; -1: not in it

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open the arrays that ``write`` wrote."""
        return cls(*(np.asarray(load_npy(folder / f"{field.name}.npy")) for field in fields(cls)))

    def write(self, folder: Path) -> None:
        """Write the arrays into a folder."""
        for name, values in vars(self).items():
            np.save(folder / f"{name}.npy", values)

    def postings(self, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return word, passage and count of each posting of words ``first`` to ``end`` for passages of the snapshot."""
        part = slice(self.offset_W[first], self.offset_W[end])
        word_n = np.repeat(np.arange(first, end), np.diff(self.offset_W[first : end + 1]))
        passage_n = self.passage_R[self.posting_N[part]]
        is_present_n = passage_n >= 0
        return word_n[is_present_n], passage_n[is_present_n], self.count_N[part][is_present_n]


def _count_part(snapshot: Path, wordpieces: bool, job: tuple[Passages, Path]) -> None:
    """Count the words of some passages into a part, unless it is complete already."""
    rows, folder = job
    reader = Snapshot.open(snapshot, verify=False)
    language_key = [] if reader.language == ENGLISH else [reader.language]
    key = digest_of(
        [reader.corpus_hash, hashlib.sha256(rows.tobytes()).hexdigest(), wordpieces, NORMAL_FORM, *language_key]
    )
    with suppress(ValueError):
        if read_manifest(folder, _PART)["key"] == key:
            return
    texts = (f"{title} {text}" for title, text in reader.rows(rows, "title", "text"))
    languages = reader.code_P[rows].astype(str).tolist()
    part = _count_wordpieces(reader, rows) if wordpieces else _count_words(texts, languages, rows)
    with atomic_folder(folder) as stage:
        part.write(stage)
        write_manifest(stage, _PART, key=key)


def _count_words(texts: Iterator[str], languages: Sequence[str], rows: Passages) -> _Part:
    """Build a part from texts and their languages."""
    flat, lengths, number = array("i"), array("q"), itertools.count()
    numbers: dict[str, dict[str, int]] = {code: defaultdict(number.__next__) for code in dict.fromkeys(languages)}
    for text, language in zip(texts, languages, strict=True):
        words = split_words(text, language)
        flat.extend(map(numbers[language].__getitem__, words))
        lengths.append(len(words))
    distinct = next(number)
    code_V, kept_V = np.zeros(distinct, np.uint64), np.ones(distinct, bool)
    for language, number_of in numbers.items():
        code_V[list(number_of.values())] = stem_hashes(stems(list(number_of), language))
        kept_V[[number_of[word] for word in stop_words(language) if word in number_of]] = False
    word_T = np.array(flat, np.int32)
    row_T = np.repeat(np.arange(len(rows)), np.array(lengths, np.int64))
    kept_T = kept_V[word_T]
    word_T, row_T = word_T[kept_T], row_T[kept_T]
    code_W, place = np.unique(code_V, return_inverse=True)
    return _build_part(code_W, place[word_T], row_T, rows)


def _count_wordpieces(snapshot: Snapshot, rows: Passages) -> _Part:
    """Build a part from the wordpieces of the bodies."""
    bodies = [snapshot.body(row) for row in rows.tolist()]
    code_W, word_T = np.unique(np.concatenate(bodies), return_inverse=True)
    return _build_part(code_W, word_T, np.repeat(np.arange(len(rows)), list(map(len, bodies))), rows)


def _build_part(code_W: NDArray[Any], word_T: NDArray[Any], row_T: NDArray[Any], rows: Passages) -> _Part:
    """Build a part from word and row of each token of its texts."""
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


def _part_of_earlier(earlier: Bm25, earlier_row_P: Passages) -> _Part:
    """Return an earlier index as a part; ``earlier_row_P`` is each passage's row in the earlier snapshot, or -1."""
    passages = np.flatnonzero(earlier_row_P >= 0)
    passage_R = np.full(len(earlier), -1, np.int32)
    passage_R[earlier_row_P[passages]] = passages
    return _Part(earlier.word_W, earlier.offset_W, earlier.posting_N, earlier.count_N, earlier.length_P, passage_R)


def _word_ranges(offset_W: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of words whose postings fit into memory."""
    targets = np.arange(0, int(offset_W[-1]), _POSTINGS)
    borders = np.unique(np.append(np.searchsorted(offset_W, targets), len(offset_W) - 1)).tolist()
    yield from itertools.pairwise(borders)


def _merge(parts: Sequence[_Part], folder: Path, passages: int) -> dict[str, Any]:
    """Write the arrays of an index over all parts; return the manifest's figures."""
    word_W = np.empty(0, np.uint64)
    for first in range(0, len(parts), _MERGED_PARTS):
        word_W = np.unique(np.concatenate([word_W, *(part.word_W for part in parts[first : first + _MERGED_PARTS])]))
    frequency_W = np.zeros(len(word_W), np.int64)
    length_P = np.zeros(passages, np.int32)
    max_count = 0  # largest term frequency
    for part in parts:
        number_W = np.searchsorted(word_W, part.word_W)
        for first, end in _word_ranges(part.offset_W):
            word_n, _, count_n = part.postings(first, end)
            frequency_W[number_W[first:end]] += np.bincount(word_n - first, minlength=end - first)
            max_count = max(max_count, int(count_n.max(initial=0)))
        is_present_R = part.passage_R >= 0
        length_P[part.passage_R[is_present_R]] = part.length_R[is_present_R]
    word_W, frequency_W = word_W[frequency_W > 0], frequency_W[frequency_W > 0]
    offset_W = np.concatenate([[0], np.cumsum(frequency_W)])
    for name, values in (("words", word_W), ("posting_offsets", offset_W), ("lengths", length_P)):
        np.save(folder / f"{name}.npy", values)
    ranges = list(_word_ranges(offset_W))
    borders = word_W[[first for first, _ in ranges]]
    cuts = [[*np.searchsorted(part.word_W, borders).tolist(), len(part.word_W)] for part in parts]
    with (
        closing(NpyWriter(folder / "postings.npy", np.dtype(np.int32))) as postings,
        closing(NpyWriter(folder / "counts.npy", np.min_scalar_type(max_count))) as counts,
    ):
        for number, (first, end) in enumerate(ranges):
            keys, count = [], []
            for part, cut in zip(parts, cuts, strict=True):
                word_n, passage_n, count_n = part.postings(*cut[number : number + 2])
                number_n = np.searchsorted(word_W[first:end], part.word_W[word_n])
                keys.append(number_n << _PASSAGE_BITS | passage_n)
                count.append(count_n)
            key_n = np.concatenate(keys)
            order = np.argsort(key_n, kind="stable")  # merges the sorted runs of the parts
            postings.append((key_n[order] & ((1 << _PASSAGE_BITS) - 1)).astype(np.int32))
            counts.append(np.concatenate(count)[order])
    tokens, longest = int(length_P.sum(dtype=np.int64)), int(length_P.max())
    return {"words": len(word_W), "postings": int(offset_W[-1]), "tokens": tokens, "longest": longest}
