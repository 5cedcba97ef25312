"""Documents of records, cut into passages: the work of a process of the snapshot writer."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from realmops.corpus.documents import Document, Dropped, Outcome, Rejected, guarded
from realmops.corpus.incremental import Earlier
from realmops.corpus.ingest import Records, convert
from realmops.corpus.passages import PassageBatch, cut_passages
from realmops.corpus.snapshot_reader import DOCUMENTS
from realmops.text.special import SpecialTokens
from realmops.text.tokenizer import texts_tokenizer
from realmops.text.vocabulary import Casing, build_tokenizer, open_tokenizer

_REPEATED = 64 << 20  # characters of title and other columns in all passages of a document


def is_navigation_title(title: str) -> bool:
    """Whether REALM leaves out this Wikipedia article: a list, index, outline or disambiguation."""
    return title.startswith(("List of", "Index of", "Outline of")) or "(disambiguation)" in title


class DocumentCutter:
    """Converts records to documents, and cuts documents into passages."""

    def __init__(
        self, vocabulary: Sequence[str], tokenizer: str | None, settings: dict[str, Any], earlier: Path | None
    ) -> None:
        casing = Casing(**settings["casing"])
        one = open_tokenizer(tokenizer) if tokenizer else build_tokenizer(vocabulary, casing)
        self._tokenizer = texts_tokenizer(one)
        told = len(SpecialTokens.of(one).document) if tokenizer else 0
        self._block_wordpieces = None if settings["whole_documents"] else settings["block_wordpieces"] - told
        self._drop_titles = settings["drop_titles"]
        self._language = settings["language"]
        # one from before documents had digests is of no use
        self._earlier_folder = earlier if earlier is not None and (earlier / DOCUMENTS).is_file() else None

    def __call__(self, records: Records, /) -> tuple[list[Outcome], PassageBatch]:
        """What became of each record, and the passages of those that are documents with wordpieces."""
        outcomes = [self._admit(outcome) for outcome in convert(records)]
        documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        batch = guarded(partial(self._cut, documents), lambda _: None)
        if batch is None:  # whose fault is it?
            outcomes = [self._try(outcome) for outcome in outcomes]
            documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
            batch = self._cut(documents)
        passages = Counter(passage.document for passage in batch.passages)
        lost = {id(one): _lost(one, passages[number]) for number, one in enumerate(documents)}
        if any(lost.values()):
            outcomes = [lost.get(id(one)) or one for one in outcomes]
            batch = self._cut([outcome for outcome in outcomes if isinstance(outcome, Document)])
        return outcomes, batch

    def _cut(self, documents: Sequence[Document]) -> PassageBatch:
        room = self._block_wordpieces
        cut = partial(cut_passages, tokenizer=self._tokenizer, block_wordpieces=room, language=self._language)
        return cut(documents) if self._earlier_folder is None else self._earlier.cut(documents, cut)

    @cached_property
    def _earlier(self) -> Earlier:
        """Opened where it is used: a worker is a process of its own."""
        assert self._earlier_folder is not None
        return Earlier(self._earlier_folder)

    def _try(self, outcome: Outcome) -> Outcome:
        """The outcome, or Rejected where its passages cannot be cut."""
        if not isinstance(outcome, Document):
            return outcome
        failed = guarded(partial(self._cut, [outcome]), partial(Rejected, outcome.place))
        return failed if isinstance(failed, Rejected) else outcome

    def _admit(self, outcome: Outcome) -> Outcome:
        if self._drop_titles and isinstance(outcome, Document) and is_navigation_title(outcome.title):
            return Dropped(outcome.place, "navigation_title")
        return outcome


def _lost(document: Document, passages: int) -> Dropped | Rejected | None:
    """Return the outcome of a document without passages, or whose passages would repeat too much; else None."""
    if passages == 0:
        return Dropped(document.place, "no_wordpieces")
    if passages * (len(document.title) + len(document.extra)) > _REPEATED:
        problem = f"its title and other columns, which each of its {passages:,} passages repeats, are longer than "
        return Rejected(document.place, f"{problem}{_REPEATED >> 20} Mi characters in all; shorten them")
    return None
