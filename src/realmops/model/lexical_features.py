"""How a document's wordpieces compare with those of x, told to the reader beside the words (``reader.matches``).

A small reader that starts from scratch does not find out within a few thousand questions that equal wordpieces on
both sides of join(x, z) mean something, and its vocabulary does not keep capitals. So each wordpiece is put into one
class of each of several kinds, and the vectors of its classes are added to its embedding. They start at 0, where the
reader is the one without them. Not in the paper; DrQA's reader has features of this sort (Chen et al. 2017, 3.2).

All classes are functions of the wordpieces, of whole numbers alone: no rounding, on no device.

Shape suffixes: T wordpieces of all sequences, N sequences, V vocabulary, F kinds of classes, D width, S sentences.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.model.packed import Packed
from realmops.text.word_shape import Form

UNITS = 16  # of weight in one nat of idf
RARITIES = 5  # classes of idf
RARE = 2  # from this class on a match counts for distances
NEAR = 12  # wordpieces before and behind
SHARES = 8  # classes of a share of the question's weight
DISTANCES = (0, 1, 2, 3, 5, 8, 14, 25)  # most wordpieces to a match; then far or none
AROUND = (-2, -1, 1, 2)  # neighbours whose form counts
SENTENCE_ENDS = (".", "?", "!")
OTHER_SENTENCE_ENDS = ("。", "？", "！", "।", "؟", "۔")  # in other languages than English
FORMS = len(Form)
# kinds of questions, by the first of these words that stands in x; those behind it count more (how many, what year)
QUESTION_WORDS = (("who", "whom", "whose"), ("when",), ("where",), ("why",), ("which",), ("what",), ("how",))
BEHIND_THEM = (("many", "much"), ("year", "date", "month", "day"))
_QUESTIONS = 1 + len(QUESTION_WORDS) + len(BEHIND_THEM)

SIZES = {
    "match": 1 + 2 * RARITIES,  # in x too: the same wordpiece, or one of the same stem; how rare. And x's own in z
    "pair": 1 + RARITIES,  # with the one before or behind it
    "near": 1 + SHARES,  # what stands near of the question's weight
    "before": 2 + len(DISTANCES),  # how far the last match is, and
    "behind": 2 + len(DISTANCES),  # the next
    "sentence": 1 + SHARES,  # what stands in the same sentence of the question's weight
    "best": 3,  # whether no sentence has more of it
    "piece": 5,  # whether it continues a word, and is continued
    "asked": _QUESTIONS * FORMS,  # its form, by the kind of question
    **{f"form{offset:+d}": FORMS for offset in AROUND},
}


def _among(key_T: Tensor, chosen_T: Tensor) -> Tensor:
    """Whether each number is one of the chosen; unlike ``torch.isin`` of them, a GPU need not be asked how many."""
    sorted_T = torch.where(chosen_T, key_T, torch.iinfo(key_T.dtype).min).sort().values
    return sorted_T[torch.searchsorted(sorted_T, key_T).clamp(max=len(key_T) - 1)] == key_T


class Matches(nn.Module):
    """Vectors of the classes of each wordpiece, summed; what it knows of wordpieces comes from the snapshot."""

    weight_V: Tensor  # idf in whole ``UNITS``; 0 for special wordpieces, which match nothing
    stem_V: Tensor  # one number for all wordpieces of one stem
    question_V: Tensor  # kind of question
    continues_V: Tensor
    ends_V: Tensor  # sentences
    first_F: Tensor  # row of each kind's first vector
    bounds: Tensor  # of distances

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        for name in ("weight_V", "stem_V", "question_V", "continues_V", "ends_V"):
            self.register_buffer(name, torch.zeros(vocabulary, dtype=torch.int64))
        first_F = np.concatenate([[0], np.cumsum(list(SIZES.values()))])
        self.register_buffer("first_F", torch.from_numpy(first_F[:-1]), persistent=False)
        self.register_buffer("bounds", torch.tensor(DISTANCES), persistent=False)
        self.vectors = nn.Embedding(int(first_F[-1]), width)
        nn.init.zeros_(self.vectors.weight)

    def learn_words(
        self,
        vocabulary: Sequence[str],
        continues_V: np.ndarray,
        stems: Sequence[str],
        special: Collection[int],
        idf_V: np.ndarray,
        questions: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Take over what is known of the wordpieces of a snapshot; ``continues_V`` says which continue a word.

        Args:
            questions: of another language than English, what asks as each first word of ``QUESTION_WORDS`` and
                ``BEHIND_THEM`` does.
        """
        weight_V = np.maximum(1, np.round(UNITS * idf_V)).astype(np.int64)
        weight_V[sorted(special)] = 0
        numbers: dict[str, int] = {}
        stem_V = [numbers.setdefault(stem, i) for i, stem in enumerate(stems)]
        asking: tuple[tuple[str, ...], ...] = (*QUESTION_WORDS, *BEHIND_THEM)
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
            buffer_V[: len(values)].copy_(torch.as_tensor(values))  # an encoder may have more than its tokenizer

    def forward(self, batch: Packed) -> Tensor:
        """What is added to the embeddings of a packed batch of join(x, z), T x D."""
        batch.to(self.vectors.weight.device)
        classes = self.classes(batch)
        class_TF = torch.stack([classes[name] for name in SIZES], dim=1)
        return F.embedding_bag(self.first_F + class_TF, self.vectors.weight, mode="sum")

    @torch.no_grad()
    def classes(self, batch: Packed) -> dict[str, Tensor]:
        """The class of each wordpiece in each kind of ``SIZES``, length T; outside documents ``match`` alone counts."""
        token_T, form_T = batch.tokens_T, batch.forms_T
        count, device = len(batch), token_T.device
        row_T = torch.arange(len(token_T), device=device)
        lengths_N = batch.lengths_B
        sequence_T = torch.arange(count, device=device).repeat_interleave(lengths_N, output_size=len(token_T))
        first_T, last_T = (at_N[sequence_T] for at_N in (batch.first_B, batch.first_B + lengths_N - 1))
        weight_T = self.weight_V[token_T]
        in_x_T, in_z_T = ((weight_T > 0) & (batch.segments_T == segment) for segment in (0, 1))
        whole_N = torch.zeros_like(lengths_N).index_add(0, sequence_T, weight_T * in_x_T).clamp(min=1)

        def on_both_sides(value_T: Tensor) -> Tensor:
            """Whether what stands in z stands in x too, or the other way round."""
            key_T = value_T * count + sequence_T
            return _among(key_T, in_x_T) & in_z_T | _among(key_T, in_z_T) & in_x_T

        def share(part_T: Tensor) -> Tensor:
            return torch.where(in_z_T, 1 + (SHARES * part_T // whole_N[sequence_T]).clamp(max=SHARES - 1), 0)

        def distance(far_T: Tensor) -> Tensor:
            return torch.where(in_z_T, 1 + torch.bucketize(far_T, self.bounds), 0)

        same_T, alike_T = on_both_sides(token_T), on_both_sides(self.stem_V[token_T])
        rarity_T = RARITIES * weight_T // (self.weight_V.max() + 1)
        match_T = torch.where(same_T, 1 + rarity_T, torch.where(alike_T, 1 + RARITIES + rarity_T, 0))

        pair_T = token_T * len(self.weight_V) + token_T.roll(-1)
        pair_T = torch.where(same_T & same_T.roll(-1) & (row_T < last_T), pair_T, -1)
        paired_T = on_both_sides(pair_T) & (pair_T >= 0) & in_z_T
        paired_T = paired_T | paired_T.roll(1)  # a pair never ends a sequence: its last wordpiece is [SEP]

        hit_T = weight_T * (alike_T & in_z_T)
        sum_T = F.pad(hit_T.cumsum(0), (1, 0))
        near_T = sum_T[torch.minimum(row_T + NEAR, last_T) + 1] - sum_T[torch.maximum(row_T - NEAR, first_T)]

        far = DISTANCES[-1] + 1
        rare_T = (hit_T > 0) & (rarity_T >= RARE)
        before_T = torch.where(rare_T, row_T, -1).cummax(0).values
        behind_T = torch.where(rare_T, row_T, len(row_T)).flip(0).cummin(0).values.flip(0)
        before_T = torch.where(before_T >= first_T, row_T - before_T, far)
        behind_T = torch.where(behind_T <= last_T, behind_T - row_T, far)

        end_T = self.ends_V[token_T] * in_z_T
        sentence_T = end_T.cumsum(0) - end_T + sequence_T
        of_sentence_S = hit_T.new_zeros(len(row_T) + count).index_add(0, sentence_T, hit_T)
        of_sentence_T = of_sentence_S[sentence_T]
        most_N = torch.zeros_like(whole_N).scatter_reduce(0, sequence_T, of_sentence_T, "amax")
        is_best_T = (of_sentence_T == most_N[sequence_T]) & (of_sentence_T > 0)

        kind_T = self.question_V[token_T] * in_x_T
        asks_T = (kind_T > 0) & (kind_T <= len(QUESTION_WORDS))
        at_N = torch.full_like(whole_N, len(row_T)).scatter_reduce(
            0, sequence_T, torch.where(asks_T, row_T, len(row_T)), "amin"
        )
        behind_N = F.pad(kind_T, (0, 2))[at_N + 1]
        question_N = torch.where(behind_N > len(QUESTION_WORDS), behind_N, F.pad(kind_T, (0, 1))[at_N])

        piece_T = self.continues_V[token_T]
        piece_T = 1 + 2 * piece_T + piece_T.roll(-1) * (row_T < last_T)
        around = {}
        for offset in AROUND:
            at_T = row_T + offset
            inside_T = in_z_T & (at_T >= first_T) & (at_T <= last_T)
            around[f"form{offset:+d}"] = torch.where(inside_T, form_T[at_T.clamp(0, len(row_T) - 1)], 0)
        return {
            "match": match_T,
            "pair": torch.where(paired_T, 1 + rarity_T, 0),
            "near": share(near_T),
            "before": distance(before_T),
            "behind": distance(behind_T),
            "sentence": share(of_sentence_T),
            "best": torch.where(in_z_T, 1 + is_best_T.long(), 0),
            "piece": torch.where(in_z_T, piece_T, 0),
            "asked": torch.where(in_z_T, FORMS * question_N[sequence_T] + form_T, 0),
            **around,
        }
