"""Question answering with a published reader of spans: p(y|x) = sum over z of p(z|x) p(y|x, z) (paper, equation 1).

Shape suffixes: K passages that are read, S spans of all passages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import InvalidRequest, RetrievedPassages
from realmops.answering.span_answers import SpanAnswers
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.model.reader_files import READER_FOLDER


@dataclass(eq=False)
class ExtractiveQa(SpanAnswers):
    """Model that answers with spans of a reader in transformers' format.

    The score of a span is log p(span, z|x) = log p(z|x) + log p(span|x, z). p(z|x) is the softmax of f(x, z) times the
    retriever's reading weight.
    """

    kind = "extractive"
    generated_reading_weight = 1.0
    candidate_spans = 50
    temperature = 1.5  # products of two probabilities are overconfident (benchmarks/LOG.md)
    reader: ExtractiveReader

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> ExtractiveReader:
        return load_extractive_reader(folder / READER_FOLDER)

    @property
    def prior_weight(self) -> float:
        return self.retriever.mixture.reading

    def check(self, question: str) -> None:
        super().check(question)
        limit = self.reader.longest_question(self.options.reader_wordpieces)
        if (wordpieces := len(self.reader.tokenize(question).ids)) > limit:
            raise InvalidRequest(
                f"the question has {wordpieces} wordpieces of the reader, at most {limit} are allowed; rephrase it"
            )

    def candidates(self, retrieved: Sequence[RetrievedPassages]) -> tuple[NDArray[np.floating], np.ndarray]:
        pairs = [(item.question.question, self.snapshot.text(p)) for item in retrieved for p in item.passages]
        places = [(b, k, prior) for b, item in enumerate(retrieved) for k, prior in enumerate(item.log_prior)]
        options = self.options
        spans = self.reader.read(
            pairs,
            limit=options.reader_wordpieces,
            answer_wordpieces=options.answer_wordpieces,
            dtype=self.dtype,
        )
        scores = [part.log_p + prior for part, (_, _, prior) in zip(spans, places, strict=True)]
        prefix_S2 = np.repeat([place[:2] for place in places], [len(part.log_p) for part in spans], axis=0)
        return np.concatenate(scores), np.column_stack([prefix_S2, np.concatenate([part.chars for part in spans])])

    def log_p(self, score_S: Tensor) -> Tensor:
        return score_S

    def save_reader(self, folder: Path) -> None:
        (folder / READER_FOLDER).mkdir()
        self.reader.save(folder / READER_FOLDER)
