"""Write the BM25 index of a snapshot in constant memory.

Worker processes count the words of consecutive passages, part by part, into files of the draft; then the parts are
merged, a range of words at a time. Words and postings are sorted: the bytes do not depend on the number of workers.

Legend: W words, N postings, n postings of a range of words, T tokens, R passages of a part, P passages of the snapshot.
"""

import itertools
import multiprocessing
import shutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import atomic_folder, write_manifest
from realmops.corpus.ingest import follow_parent
from realmops.corpus.languages import ENGLISH, NORMAL_FORM, find_tokens
from realmops.corpus.npy_files import NpyWriter, load_npy
from realmops.corpus.snapshot_reader import ROWS_PER_BATCH, Snapshot
from realmops.search.bm25 import KIND, stem_hashes, stems, token_length, word_forms

_PASSAGES = 32 * ROWS_PER_BATCH  # per part
_POSTINGS = 1 << 20  # sorted at a time, plus those of one word
_MERGED_PARTS = 16  # parts whose vocabularies are merged at a time
_PASSAGE_BITS = 31


def write_bm25(
    folder: Path, snapshot: Snapshot, progress: Callable[[int], None] = lambda passages: None, *,
    workers: int = 1, wordpieces: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the BM25 index of a snapshot into a folder atomically; return its manifest.

    Args:
        folder: the folder to write.
        snapshot: its passages.
        progress: called with the number of passages done since the last call.
        workers: number of counting processes; 1 counts in this process.
        wordpieces: index the wordpieces of the bodies, with their ids as keys, for ``Bm25.search``.
    """
    with atomic_folder(folder, KIND) as stage:
        parts_folder = stage / "parts"
        borders = [*range(0, len(snapshot), _PASSAGES), len(snapshot)]
        jobs = [(np.arange(*rows), parts_folder / str(rows[0])) for rows in itertools.pairwise(borders)]
        parts = []
        with _worker_pool(min(workers, len(jobs))) as apply:
            results = apply(partial(_count_part, snapshot.folder, wordpieces), jobs)
            for (rows, path), _ in zip(jobs, results, strict=True):
                parts.append(_Part.read(path))
                progress(len(rows))
        figures = _merge(parts, stage) | ({} if wordpieces else _write_languages(snapshot, stage))
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
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=follow_parent) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Part:
    """Word counts of consecutive passages, in memory-mapped files that are read a range of words at a time."""

    word_W: NDArray[np.uint64]  # ascending
    offset_W: NDArray[np.int64]  # the postings of each word, W + 1
    posting_N: NDArray[np.int32]  # passages of the snapshot
    count_N: NDArray[Any]
    length_R: NDArray[np.int32]

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(*(np.asarray(load_npy(folder / f"{field.name}.npy")) for field in fields(cls)))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, values in vars(self).items():
            np.save(folder / f"{name}.npy", values)


def _count_part(snapshot: Path, wordpieces: bool, job: tuple[NDArray[np.int64], Path]) -> None:
    """Count the words of consecutive passages into a part."""
    rows, folder = job
    reader = Snapshot.open(snapshot, verify=False)
    if wordpieces:
        bodies = [reader.body(row) for row in rows.tolist()]
        code_W, word_T = np.unique(np.concatenate(bodies), return_inverse=True)
        part = _build_part(code_W, word_T, np.repeat(np.arange(len(rows)), list(map(len, bodies))), rows)
    else:
        texts = (f"{title} {text}" for title, text in reader.rows(rows, "title", "text"))
        part = _count_words(texts, reader.code_P[rows].astype(str).tolist(), rows)
    part.write(folder)


def _count_words(texts: Iterator[str], languages: Sequence[str], rows: NDArray[np.int64]) -> _Part:
    """Build a part from texts and their languages."""
    flat, sizes, number = array("i"), array("q"), itertools.count()
    numbers: dict[str, dict[str, int]] = {code: defaultdict(number.__next__) for code in dict.fromkeys(languages)}
    for text, language in zip(texts, languages, strict=True):
        found = find_tokens(text, language)
        flat.extend(map(numbers[language].__getitem__, found))
        sizes.append(len(found))
    first_V, size_V, length_V = np.zeros((3, next(number)), np.int64)  # first word, words and length of each token
    codes = [np.empty(0, np.uint64)]
    for language, number_of in numbers.items():
        forms, of_language = [word_forms(token, language) for token in number_of], list(number_of.values())
        size_V[of_language] = [len(words) for words in forms]
        first_V[of_language] = sum(map(len, codes)) + np.cumsum(size_V[of_language]) - size_V[of_language]
        length_V[of_language] = [token_length(token, language) for token in number_of]
        codes.append(stem_hashes(stems([*itertools.chain.from_iterable(forms)], language)))
    token_T, row_T = np.array(flat, np.int32), np.repeat(np.arange(len(rows)), np.array(sizes, np.int64))
    length_R = np.bincount(row_T, length_V[token_T], len(rows)).astype(np.int32)
    words, of_rows = [], []
    for form in range(size_V.max(initial=1)):  # few tokens have a second
        has_form = size_V[token_T] > form
        token_T, row_T = token_T[has_form], row_T[has_form]
        words.append(first_V[token_T] + form)
        of_rows.append(row_T)
    code_W, place = np.unique(np.concatenate(codes), return_inverse=True)
    part = _build_part(code_W, place[np.concatenate(words)], np.concatenate(of_rows), rows)
    return replace(part, length_R=length_R)


def _build_part(code_W: NDArray[Any], word_T: NDArray[Any], row_T: NDArray[Any], rows: NDArray[np.int64]) -> _Part:
    """Build a part from word and row of each token of its texts."""
    key_T = np.sort(word_T << _PASSAGE_BITS | row_T)
    first_N = np.flatnonzero(np.diff(key_T, prepend=-1))
    key_N = key_T[first_N]
    return _Part(
        code_W.astype(np.uint64),
        np.searchsorted(key_N >> _PASSAGE_BITS, np.arange(len(code_W) + 1)),
        ((key_N & ((1 << _PASSAGE_BITS) - 1)) + rows[0]).astype(np.int32),
        np.diff(first_N, append=len(key_T)).astype(np.int32),
        np.bincount(row_T, minlength=len(rows)).astype(np.int32),
    )


def _word_ranges(offset_W: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of words whose postings fit into memory."""
    targets = np.arange(0, int(offset_W[-1]), _POSTINGS)
    borders = np.unique(np.append(np.searchsorted(offset_W, targets), len(offset_W) - 1)).tolist()
    yield from itertools.pairwise(borders)


def _merge(parts: Sequence[_Part], folder: Path) -> dict[str, Any]:
    """Write the arrays of an index over all parts; return the manifest's figures."""
    word_W = np.empty(0, np.uint64)
    for first in range(0, len(parts), _MERGED_PARTS):
        word_W = np.unique(np.concatenate([word_W, *(part.word_W for part in parts[first : first + _MERGED_PARTS])]))
    frequency_W = np.zeros(len(word_W), np.int64)
    for part in parts:
        frequency_W[np.searchsorted(word_W, part.word_W)] += np.diff(part.offset_W)
    word_W, frequency_W = word_W[frequency_W > 0], frequency_W[frequency_W > 0]  # stop words have no postings
    offset_W = np.concatenate([[0], np.cumsum(frequency_W)])
    length_P = np.concatenate([part.length_R for part in parts])
    for name, values in (("words", word_W), ("posting_offsets", offset_W), ("lengths", length_P)):
        np.save(folder / f"{name}.npy", values)
    max_count = max(int(part.count_N.max(initial=0)) for part in parts)
    ranges = list(_word_ranges(offset_W))
    borders = word_W[[first for first, _ in ranges]]
    cuts = [[*np.searchsorted(part.word_W, borders).tolist(), len(part.word_W)] for part in parts]
    with (
        closing(NpyWriter(folder / "postings.npy", np.dtype(np.int32))) as postings,
        closing(NpyWriter(folder / "counts.npy", np.min_scalar_type(max_count))) as counts,
    ):
        for number in range(len(ranges)):
            words, passages, count = [], [], []
            for part, cut in zip(parts, cuts, strict=True):
                first, end = cut[number : number + 2]
                slice_n = slice(part.offset_W[first], part.offset_W[end])
                words.append(np.repeat(part.word_W[first:end], np.diff(part.offset_W[first : end + 1])))
                passages.append(part.posting_N[slice_n])
                count.append(part.count_N[slice_n])
            order = np.argsort(np.concatenate(words), kind="stable")  # keeps the passages of a word ascending
            postings.append(np.concatenate(passages)[order])
            counts.append(np.concatenate(count)[order])
    tokens, longest = int(length_P.sum(dtype=np.int64)), int(length_P.max())
    return {"words": len(word_W), "postings": int(offset_W[-1]), "tokens": tokens, "longest": longest}
