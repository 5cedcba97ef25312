"""Lexical features of join(x, z) for the reader: which wordpieces of z match x, and how (``reader.matches``).

A small untrained reader does not learn within a few thousand questions that equal wordpieces matter. So embeddings of
categorical features, which start at 0, are added to its word embeddings, as in DrQA (Chen et al. 2017, 3.2), not in the
paper. They are computed in integers, so that no device rounds them.

Shape suffixes: T wordpieces in the batch, N sequences, V vocabulary, F features, D width, S sentences.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.corpus.word_shape import WordShape
from realmops.model.packed import PackedBatch

UNITS = 16  # integer weight per nat of idf
RARITIES = 5  # classes of idf
RARE = 2  # lowest class of idf whose matches count in distances
NEAR = 12  # wordpieces on either side
SHARES = 8  # classes of a share of the question's weight
DISTANCES = (0, 1, 2, 3, 5, 8, 14, 25)  # upper bounds of the distance classes, in wordpieces; then far or none
NEIGHBOURS = (-2, -1, 1, 2)  # offsets of the wordpieces whose word shape is a feature
SENTENCE_ENDS = (".", "?", "!")
OTHER_SENTENCE_ENDS = ("。", "？", "！", "।", "؟", "۔")  # for languages other than English
FORMS = len(WordShape)
# A question's type is that of its first question word, or of the word that follows it (how many, what year).
QUESTION_WORDS = (("who", "whom", "whose"), ("when",), ("where",), ("why",), ("which",), ("what",), ("how",))
FOLLOWING_WORDS = (("many", "much"), ("year", "date", "month", "day"))
_QUESTIONS = 1 + len(QUESTION_WORDS) + len(FOLLOWING_WORDS)

SIZES = {  # number of classes of each feature
    "match": 1 + 2 * RARITIES,  # the other side has the same wordpiece, or one of its stem; by rarity
    "pair": 1 + RARITIES,  # matches together with the previous or the next wordpiece
    "near": 1 + SHARES,  # share of the question's weight matched within NEAR wordpieces
    "previous": 2 + len(DISTANCES),  # distance to the previous rare match
    "next": 2 + len(DISTANCES),  # distance to the next rare match
    "sentence": 1 + SHARES,  # share of the question's weight matched in the same sentence
    "best": 3,  # whether no other sentence has a larger share
    "piece": 5,  # whether it continues a word, and is continued
    "question": _QUESTIONS * FORMS,  # word shape, by type of question
    **{f"form{offset:+d}": FORMS for offset in NEIGHBOURS},
}


def _is_in(key_T: Tensor, selected_T: Tensor) -> Tensor:
    """Return whether each key equals a selected key; unlike ``torch.isin``, this never waits for the GPU."""
    sorted_T = torch.where(selected_T, key_T, torch.iinfo(key_T.dtype).min).sort().values
    return sorted_T[torch.searchsorted(sorted_T, key_T).clamp(max=len(key_T) - 1)] == key_T


class LexicalFeatures(nn.Module):
    """Sum of the feature embeddings of each wordpiece; word statistics are those of the snapshot."""

    weight_V: Tensor  # idf in ``UNITS``; 0 for special wordpieces, which match nothing
    stem_V: Tensor  # id of the stem
    question_V: Tensor  # type of question
    continues_V: Tensor  # whether a wordpiece continues a word
    ends_V: Tensor  # whether a wordpiece ends a sentence
    first_F: Tensor  # row of each feature's first embedding
    bounds: Tensor  # DISTANCES

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        for name in ("weight_V", "stem_V", "question_V", "continues_V", "ends_V"):
            self.register_buffer(name, torch.zeros(vocabulary, dtype=torch.int64))
        first_F = np.concatenate([[0], np.cumsum(list(SIZES.values()))])
        self.register_buffer("first_F", torch.from_numpy(first_F[:-1]), persistent=False)
        self.register_buffer("bounds", torch.tensor(DISTANCES), persistent=False)
        self.vectors = nn.Embedding(int(first_F[-1]), width)
        self.vectors.weight.data.zero_()

    def learn_words(
        self,
        vocabulary: Sequence[str],
        continues_V: np.ndarray,
        stems: Sequence[str],
        special: Collection[int],
        idf_V: np.ndarray,
        questions: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Fill the word statistics from a snapshot; lists and arrays are by id of the wordpiece, ``idf_V`` in nats.

        For languages other than English, ``questions`` has question words by the first word of each entry in
        ``QUESTION_WORDS`` and ``FOLLOWING_WORDS``.
        """
        weight_V = np.maximum(1, np.round(UNITS * idf_V)).astype(np.int64)
        weight_V[sorted(special)] = 0
        stem_ids: dict[str, int] = {}
        stem_V = [stem_ids.setdefault(stem, i) for i, stem in enumerate(stems)]
        asking: tuple[tuple[str, ...], ...] = (*QUESTION_WORDS, *FOLLOWING_WORDS)
        if questions is not None:
            asking = tuple(tuple(questions.get(words[0], ())) for words in asking)
        ends = SENTENCE_ENDS if questions is None else (*SENTENCE_ENDS, *OTHER_SENTENCE_ENDS)
        kinds = {word: 1 + i for i, words in enumerate(asking) for word in words}
        for buffer_V, values in (
            (self.weight_V, weight_V),
            (self.stem_V, stem_V),
            (self.question_V, [kinds.get(piece, 0) for piece in vocabulary]),
            (self.continues_V, continues_V),
            (self.ends_V, [int(piece in ends) for piece in vocabulary]),
        ):
            buffer_V[: len(values)].copy_(torch.as_tensor(values))  # an encoder may have spare rows

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute the vectors to add to the word embeddings of a batch of join(x, z), T x D."""
        batch.to(self.vectors.weight.device)
        classes = self.classes(batch)
        class_TF = torch.stack([classes[name] for name in SIZES], dim=1)
        return F.embedding_bag(self.first_F + class_TF, self.vectors.weight, mode="sum")

    @torch.no_grad()
    def classes(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Compute each feature of ``SIZES``, length T; outside documents all but ``match`` are 0."""
        token_T, form_T = batch.tokens_T, batch.forms_T
        count, device = len(batch), token_T.device
        row_T = torch.arange(len(token_T), device=device)
        lengths_N = batch.lengths_B
        sequence_T = torch.arange(count, device=device).repeat_interleave(lengths_N, output_size=len(token_T))
        first_T, last_T = (row_N[sequence_T] for row_N in (batch.first_B, batch.first_B + lengths_N - 1))
        weight_T = self.weight_V[token_T]
        in_x_T, in_z_T = ((weight_T > 0) & (batch.segments_T == segment) for segment in (0, 1))
        whole_N = torch.zeros_like(lengths_N).index_add(0, sequence_T, weight_T * in_x_T).clamp(min=1)

        def on_both_sides(value_T: Tensor) -> Tensor:
            """Return whether a value of z occurs in x too, or a value of x in z."""
            key_T = value_T * count + sequence_T
            return _is_in(key_T, in_x_T) & in_z_T | _is_in(key_T, in_z_T) & in_x_T

        def share(part_T: Tensor) -> Tensor:
            return torch.where(in_z_T, 1 + (SHARES * part_T // whole_N[sequence_T]).clamp(max=SHARES - 1), 0)

        def distance(far_T: Tensor) -> Tensor:
            return torch.where(in_z_T, 1 + torch.bucketize(far_T, self.bounds), 0)

        same_T, same_stem_T = on_both_sides(token_T), on_both_sides(self.stem_V[token_T])
        rarity_T = RARITIES * weight_T // (self.weight_V.max() + 1)
        match_T = torch.where(same_T, 1 + rarity_T, torch.where(same_stem_T, 1 + RARITIES + rarity_T, 0))

        pair_T = token_T * len(self.weight_V) + token_T.roll(-1)
        pair_T = torch.where(same_T & same_T.roll(-1) & (row_T < last_T), pair_T, -1)
        paired_T = on_both_sides(pair_T) & (pair_T >= 0) & in_z_T
        paired_T = paired_T | paired_T.roll(1)  # a pair never ends a sequence: its last wordpiece is [SEP]

        hit_T = weight_T * (same_stem_T & in_z_T)
        sum_T = F.pad(hit_T.cumsum(0), (1, 0))
        near_T = sum_T[torch.minimum(row_T + NEAR, last_T) + 1] - sum_T[torch.maximum(row_T - NEAR, first_T)]

        far = DISTANCES[-1] + 1
        rare_T = (hit_T > 0) & (rarity_T >= RARE)
        previous_T = torch.where(rare_T, row_T, -1).cummax(0).values
        next_T = torch.where(rare_T, row_T, len(row_T)).flip(0).cummin(0).values.flip(0)
        previous_T = torch.where(previous_T >= first_T, row_T - previous_T, far)
        next_T = torch.where(next_T <= last_T, next_T - row_T, far)

        end_T = self.ends_V[token_T] * in_z_T
        sentence_T = end_T.cumsum(0) - end_T + sequence_T
        hits_S = hit_T.new_zeros(len(row_T) + count).index_add(0, sentence_T, hit_T)
        sentence_hits_T = hits_S[sentence_T]
        most_N = torch.zeros_like(whole_N).scatter_reduce(0, sequence_T, sentence_hits_T, "amax")
        is_best_T = (sentence_hits_T == most_N[sequence_T]) & (sentence_hits_T > 0)

        type_T = self.question_V[token_T] * in_x_T
        is_question_word_T = (type_T > 0) & (type_T <= len(QUESTION_WORDS))
        word_N = torch.full_like(whole_N, len(row_T)).scatter_reduce(
            0, sequence_T, torch.where(is_question_word_T, row_T, len(row_T)), "amin"
        )
        following_N = F.pad(type_T, (0, 2))[word_N + 1]
        question_N = torch.where(following_N > len(QUESTION_WORDS), following_N, F.pad(type_T, (0, 1))[word_N])

        piece_T = self.continues_V[token_T]
        piece_T = 1 + 2 * piece_T + piece_T.roll(-1) * (row_T < last_T)
        neighbours = {}
        for offset in NEIGHBOURS:
            other_T = row_T + offset
            inside_T = in_z_T & (other_T >= first_T) & (other_T <= last_T)
            neighbours[f"form{offset:+d}"] = torch.where(inside_T, form_T[other_T.clamp(0, len(row_T) - 1)], 0)
        return {
            "match": match_T,
            "pair": torch.where(paired_T, 1 + rarity_T, 0),
            "near": share(near_T),
            "previous": distance(previous_T),
            "next": distance(next_T),
            "sentence": share(sentence_hits_T),
            "best": torch.where(in_z_T, 1 + is_best_T.long(), 0),
            "piece": torch.where(in_z_T, piece_T, 0),
            "question": torch.where(in_z_T, FORMS * question_N[sequence_T] + form_T, 0),
            **neighbours,
        }
