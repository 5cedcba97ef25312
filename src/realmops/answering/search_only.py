"""Search without a reader: passages and no answers."""

from collections.abc import Sequence
from pathlib import Path

from realmops.answering.answer import Answer, ReadPassage, RetrievedPassages
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.snapshot_reader import Snapshot


class SearchOnly(RetrieveAndRead):
    """Model that retrieves passages and answers no question (``reader.init: none``)."""

    kind = "search"

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> None:
        """Return None: there is no reader."""

    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        """Return the retrieved passages of each question without an answer."""
        return [
            Answer(
                item.question.question,
                None,
                y=y or "",
                read=tuple(
                    ReadPassage(passage, prior, 0.0, None, None, None)
                    for passage, prior in zip(item.passages, item.log_prior, strict=True)
                ),
                ranked=list(item.ranked),
            )
            for item, y in zip(retrieved, target_answers or [None] * len(retrieved), strict=True)
        ]
