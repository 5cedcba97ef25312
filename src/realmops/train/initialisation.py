"""Initialise models from corpus statistics: LSI vectors of a bag, and a reader's inverse document frequencies.

Shape suffixes: P passages of the sample, V vocabulary, E embedding width, Q columns of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from realmops.artifacts import seed_for
from realmops.corpus.languages import ENGLISH, load_languages
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.reader import Reader
from realmops.model.retriever import BagOfWords, Retriever
from realmops.model.sequences import SpecialTokens
from realmops.search.bm25 import stems
from realmops.search.embed import Progress, document_sequences, no_progress

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

LSI_PASSAGES = 100_000  # sample size, at most
_ITERATIONS = 4  # of subspace iteration
_OVERSAMPLING = 32  # directions iterated in addition to the requested ones
_BATCH = 4096  # passages whose wordpieces are in memory at a time


def init_towers(retriever: Retriever, snapshot: Snapshot, seed: int, progress: Callable[[str, int], Progress]) -> None:
    """Initialise a bag of words from the passages; ``progress(label, total)`` returns a progress callback."""
    if isinstance(retriever.query, BagOfWords):
        rows = _sample(snapshot, LSI_PASSAGES, seed)
        init_bag(retriever.query, snapshot, rows, seed, progress("word vectors", len(rows)))


def init_lexical_features(
    reader: Reader, snapshot: Snapshot, seed: int, progress: Callable[[str, int], Progress]
) -> None:
    """Give a reader with lexical features the wordpieces' inverse document frequencies and stems."""
    if reader.matches is None:
        return
    rows = _sample(snapshot, LSI_PASSAGES, seed)
    passages_V = np.asarray(_presence(snapshot, rows, progress("wordpieces", len(rows))).sum(0)).ravel()
    idf_V = wordpiece_idf(np.maximum(passages_V, 1), len(rows))
    special = _special(snapshot).tolist()
    language = snapshot.languages[0]
    stem_V = stems(snapshot.words, language)
    question_words = None if language == ENGLISH else _question_words(snapshot, language)
    reader.matches.learn_words(snapshot.words, snapshot.continues_word, stem_V, special, idf_V, question_words)


def _question_words(snapshot: Snapshot, language: str) -> dict[str, set[str]]:
    """Return the question words of a language by kind, normalised as by the snapshot's tokenizer."""
    normalizer = snapshot.tokenizer.normalizer
    words_by_kind = load_languages()[language].questions
    return {
        kind: {(normalizer.normalize_str(word) if normalizer else word).strip().lower() for word in words}
        for kind, words in words_by_kind.items()
        if " " not in kind
    }


def init_bag(bag: BagOfWords, snapshot: Snapshot, rows: list[int], seed: int, progress: Progress = no_progress) -> None:
    """Set word vectors to idf times the right singular vectors of presence x idf; special wordpieces get 0."""
    count_PV = _presence(snapshot, rows, progress)
    idf_V = wordpiece_idf(np.asarray(count_PV.sum(0)).ravel(), len(rows))
    vector_VE = idf_V[:, None] * latent_directions(_tfidf(count_PV, idf_V), bag.width, seed)
    special = _special(snapshot)
    vector_VE[special] = 0.0
    with torch.no_grad():
        bag.word.weight.copy_(torch.from_numpy(vector_VE))
        bag.counts_V.fill_(1.0)
        bag.counts_V[torch.from_numpy(special)] = 0.0


def wordpiece_idf(frequency_V: np.ndarray, count: int) -> np.ndarray:
    """Return BM25's idf, log(1 + (P - n + 1/2) / (n + 1/2)), of wordpieces in n of P passages; 0 for n = 0."""
    idf_V = np.log1p((count - frequency_V + 0.5) / (frequency_V + 0.5))
    return np.where(frequency_V > 0, idf_V, 0.0).astype(np.float32)


def latent_directions(matrix_PV: csr_matrix, width: int, seed: int) -> np.ndarray:
    """Return the first ``width`` right singular vectors of a sparse matrix as orthonormal columns, V x E.

    Computed by subspace iteration from seeded random directions (Halko et al. 2011). Columns beyond the rank of the
    matrix are orthogonal to all passages.
    """
    rng = np.random.default_rng(seed_for(seed, "lsi"))
    columns = min(width + _OVERSAMPLING, matrix_PV.shape[1])
    matrix_VP = matrix_PV.T.tocsr()
    basis_VQ = np.linalg.qr(rng.standard_normal((matrix_PV.shape[1], columns), dtype=np.float32))[0]
    for _ in range(_ITERATIONS):
        basis_VQ = np.linalg.qr(matrix_VP @ (matrix_PV @ basis_VQ))[0]
    projected_PQ = (matrix_PV @ basis_VQ).astype(np.float64)
    _, eigenvector_QQ = np.linalg.eigh(projected_PQ.T @ projected_PQ)  # in ascending order of eigenvalues
    return fix_signs(basis_VQ @ eigenvector_QQ[:, ::-1][:, :width]).astype(np.float32)


def fix_signs(vector_DE: np.ndarray) -> np.ndarray:
    """Flip each column so that its largest entry is positive: the sign of a singular vector is arbitrary."""
    largest_E = np.abs(vector_DE).argmax(0)
    flipped: np.ndarray = vector_DE * np.where(vector_DE[largest_E, np.arange(vector_DE.shape[1])] < 0, -1.0, 1.0)
    return flipped


def _sample(snapshot: Snapshot, size: int, seed: int) -> list[int]:
    """Return a sorted random sample of rows; all rows if there are no more than ``size``."""
    if len(snapshot) <= size:
        return list(range(len(snapshot)))
    rng = np.random.default_rng(seed_for(seed, "start"))
    rows: list[int] = np.sort(rng.choice(len(snapshot), size, replace=False)).tolist()
    return rows


def _special(snapshot: Snapshot) -> np.ndarray:
    return np.array(SpecialTokens.of(snapshot.tokenizer).ids)


def _presence(snapshot: Snapshot, rows: list[int], progress: Progress) -> csr_matrix:
    """Return the binary matrix of wordpieces in passages (title and body), P x V, without special wordpieces."""
    from scipy.sparse import csr_matrix

    special = _special(snapshot)

    def distinct_wordpieces() -> Iterator[np.ndarray]:
        for first in range(0, len(rows), _BATCH):
            batch = rows[first : first + _BATCH]
            for tokens, _ in document_sequences(snapshot, batch):
                yield np.setdiff1d(tokens, special).astype(np.int32)
            progress(len(batch))

    words = list(distinct_wordpieces())
    starts = np.concatenate([[0], np.cumsum([len(w) for w in words])])
    columns = np.concatenate(words)
    shape = (len(rows), snapshot.tokenizer.get_vocab_size())
    return csr_matrix((np.ones(len(columns), np.float32), columns, starts), shape=shape)


def _tfidf(count_PV: csr_matrix, idf_V: np.ndarray) -> csr_matrix:
    """Multiply columns by idf and normalise rows, so that long passages weigh no more than short ones."""
    from scipy.sparse import diags

    weighted_PV = count_PV @ diags(idf_V)
    length_P = np.sqrt(np.asarray(weighted_PV.multiply(weighted_PV).sum(1)).ravel())
    return (diags(1 / np.maximum(length_P, 1e-9).astype(np.float32)) @ weighted_PV).tocsr()
