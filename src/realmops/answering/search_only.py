"""Search without a reader: passages and no answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from realmops.answering.answer import Answer, RetrievedPassages
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.snapshot_reader import Snapshot


class SearchOnly(RetrieveAndRead):
    """Model that retrieves passages and answers no question (``reader.init: none``)."""

    kind = "search"
    gives_answers = False

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> None:
        """Return None: there is no reader."""

    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        ys = target_answers or [None] * len(retrieved)
        return [replace(Answer.unread(item), y=y or "") for item, y in zip(retrieved, ys, strict=True)]
