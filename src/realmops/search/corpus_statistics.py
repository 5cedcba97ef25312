"""What models take from the passages: a bag by latent semantic indexing, a projection by PCA, a reader's idf.

Shape suffixes: P passages of the sample, V vocabulary, E embedding width, D encoder width, Q columns that are iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.reader import Reader
from realmops.model.retriever import Bag, Dense, Embedder, Retriever
from realmops.model.sequences import SpecialTokens
from realmops.search.bm25 import stems
from realmops.search.embed import Progress, document_sequences, embed, no_progress
from realmops.text.languages import ENGLISH, languages

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

LSI_PASSAGES = 100_000  # looked at, at most
PCA_PASSAGES = 4096
_ROUNDS = 4  # of subspace iteration
_EXTRA = 32  # directions beside those that are wanted
_TOGETHER = 4096


def start_from_passages(
    retriever: Retriever, snapshot: Snapshot, dtype: torch.dtype, seed: int, progress: Callable[[str, int], Progress]
) -> None:
    """Fill what the towers take from the passages of a snapshot, which is nothing for most; both start equal.

    ``progress(label, total)`` gives a bar.
    """
    tower = retriever.query
    if isinstance(tower, Bag):
        rows = _sample(snapshot, LSI_PASSAGES, seed)
        start_bag(tower, snapshot, rows, seed, progress("word vectors", len(rows)))
    elif isinstance(tower, Embedder) and tower.start == "pca":
        rows = _sample(snapshot, PCA_PASSAGES, seed)
        start_pca(tower, snapshot, rows, dtype, progress("principal components", len(rows)))
    else:
        return
    if not retriever.shared:
        retriever.document.load_state_dict(tower.state_dict())


def start_matches(reader: Reader, snapshot: Snapshot, seed: int, progress: Callable[[str, int], Progress]) -> None:
    """Tell a reader that compares wordpieces how rare they are in the passages, and which have one stem."""
    if reader.matches is None:
        return
    rows = _sample(snapshot, LSI_PASSAGES, seed)
    passages_V = np.asarray(_presence(snapshot, rows, progress("wordpieces", len(rows))).sum(0)).ravel()
    idf_V = inverse_document_frequency(np.maximum(passages_V, 1), len(rows))
    special = _special(snapshot).tolist()
    language = snapshot.languages[0]
    stem_V = stems(snapshot.words, language)
    asking = None if language == ENGLISH else _asking(snapshot, language)
    reader.matches.learn_words(snapshot.words, snapshot.continues_word, stem_V, special, idf_V, asking)


def _asking(snapshot: Snapshot, language: str) -> dict[str, set[str]]:
    """The question words of a language by kind, as the snapshot's tokenizer writes them."""
    normal = snapshot.tokenizer.normalizer
    known = languages()[language].questions
    return {
        kind: {(normal.normalize_str(word) if normal else word).strip().lower() for word in words}
        for kind, words in known.items()
        if " " not in kind
    }


def start_bag(bag: Bag, snapshot: Snapshot, rows: list[int], seed: int, progress: Progress = no_progress) -> None:
    """Word vectors are idf times the right singular vectors of the passages' presence x idf; special wordpieces 0."""
    count_PV = _presence(snapshot, rows, progress)
    idf_V = inverse_document_frequency(np.asarray(count_PV.sum(0)).ravel(), len(rows))
    vector_VE = idf_V[:, None] * latent_directions(_weighted(count_PV, idf_V), bag.width, seed)
    special = _special(snapshot)
    vector_VE[special] = 0.0
    with torch.no_grad():
        bag.word.weight.copy_(torch.from_numpy(vector_VE))
        bag.counts_V.fill_(1.0)
        bag.counts_V[torch.from_numpy(special)] = 0.0


def inverse_document_frequency(passages_V: np.ndarray, count: int) -> np.ndarray:
    """BM25's idf, log(1 + (P - n + 1/2) / (n + 1/2)), of wordpieces that n of P passages have; 0 where n is 0."""
    idf_V = np.log1p((count - passages_V + 0.5) / (passages_V + 0.5))
    return np.where(passages_V > 0, idf_V, 0.0).astype(np.float32)


def latent_directions(matrix_PV: csr_matrix, width: int, seed: int) -> np.ndarray:
    """The first ``width`` right singular vectors of a sparse matrix as columns, V x E; of length 1, orthogonal.

    By subspace iteration from seeded random directions (Halko et al. 2011). Beyond the matrix' rank they are
    directions that no passage has a part in.
    """
    rng = np.random.default_rng(seed_for(seed, "lsi"))
    columns = min(width + _EXTRA, matrix_PV.shape[1])
    turned_VP = matrix_PV.T.tocsr()
    basis_VQ = np.linalg.qr(rng.standard_normal((matrix_PV.shape[1], columns), dtype=np.float32))[0]
    for _ in range(_ROUNDS):
        basis_VQ = np.linalg.qr(turned_VP @ (matrix_PV @ basis_VQ))[0]
    part_PQ = (matrix_PV @ basis_VQ).astype(np.float64)
    _, turn_QQ = np.linalg.eigh(part_PQ.T @ part_PQ)  # eigenvalues ascend
    return signed(basis_VQ @ turn_QQ[:, ::-1][:, :width]).astype(np.float32)


def start_pca(
    tower: Embedder, snapshot: Snapshot, rows: list[int], dtype: torch.dtype, progress: Progress = no_progress
) -> None:
    """The projection becomes the passages' principal components, its bias puts their mean at 0."""
    assert tower.projection is not None
    encoder, pooling, segments = tower.encoder, tower.pooling, tower.segments
    shapes = [layer.shape for layer in tower.dense if isinstance(layer, Dense)]
    kind = {"pooling": pooling, "projection": "identity", "segments": segments}
    plain = Embedder(encoder, tower.pooled_width, "paper", dense=shapes, **kind)  # type: ignore[arg-type]
    plain.dense = tower.dense
    plain.train(tower.training)  # which embed() puts back, in the encoder that both have
    pooled_PD = embed(plain, document_sequences(snapshot, rows), dtype, progress)
    weight_ED, bias_E = principal_components(pooled_PD, tower.width)
    with torch.no_grad():
        tower.projection.weight.copy_(weight_ED)
        tower.projection.bias.copy_(bias_E)


def principal_components(x_PD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """W (E x D) and b of the map W x + b to the first ``width`` principal components of the rows, centred."""
    mean_D = x_PD.double().mean(0)
    centred_PD = x_PD.double() - mean_D
    _, turn_DD = torch.linalg.eigh(centred_PD.T @ centred_PD)
    weight_ED = torch.from_numpy(signed(turn_DD.flip(1)[:, :width].numpy())).T
    return weight_ED.float(), (-weight_ED @ mean_D).float()


def signed(vector_DE: np.ndarray) -> np.ndarray:
    """Each column turned so that its largest entry is positive: singular vectors have no sign of their own."""
    largest_E = np.abs(vector_DE).argmax(0)
    turned: np.ndarray = vector_DE * np.where(vector_DE[largest_E, np.arange(vector_DE.shape[1])] < 0, -1.0, 1.0)
    return turned


def _sample(snapshot: Snapshot, most: int, seed: int) -> list[int]:
    """Passages in their order, all of them where there are no more."""
    if len(snapshot) <= most:
        return list(range(len(snapshot)))
    rng = np.random.default_rng(seed_for(seed, "start"))
    rows: list[int] = np.sort(rng.choice(len(snapshot), most, replace=False)).tolist()
    return rows


def _special(snapshot: Snapshot) -> np.ndarray:
    return np.array(SpecialTokens.of(snapshot.tokenizer).ids)


def _presence(snapshot: Snapshot, rows: list[int], progress: Progress) -> csr_matrix:
    """Which passages (title and body) have which wordpieces, P x V of ones; special ones are nowhere."""
    from scipy.sparse import csr_matrix

    special = _special(snapshot)

    def found() -> Iterator[np.ndarray]:
        for first in range(0, len(rows), _TOGETHER):
            chosen = rows[first : first + _TOGETHER]
            for tokens, _ in document_sequences(snapshot, chosen):
                yield np.setdiff1d(tokens, special).astype(np.int32)
            progress(len(chosen))

    words = list(found())
    starts = np.concatenate([[0], np.cumsum([len(w) for w in words])])
    columns = np.concatenate(words)
    shape = (len(rows), snapshot.tokenizer.get_vocab_size())
    return csr_matrix((np.ones(len(columns), np.float32), columns, starts), shape=shape)


def _weighted(count_PV: csr_matrix, idf_V: np.ndarray) -> csr_matrix:
    """Columns times idf, then rows of length 1: a long passage is no more than a short one."""
    from scipy.sparse import diags

    weighted_PV = count_PV @ diags(idf_V)
    length_P = np.sqrt(np.asarray(weighted_PV.multiply(weighted_PV).sum(1)).ravel())
    return (diags(1 / np.maximum(length_P, 1e-9).astype(np.float32)) @ weighted_PV).tocsr()
