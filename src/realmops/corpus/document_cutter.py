"""Conversion of records to documents and passages: the task of a worker process of the snapshot writer."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from realmops.corpus.incremental import EarlierSnapshot
from realmops.corpus.ingest import Records, parse_records
from realmops.corpus.passages import PassageBatch, cut_passages
from realmops.corpus.snapshot_reader import DOCUMENTS
from realmops.corpus.special_tokens import SpecialTokens
from realmops.corpus.tokenizer import build_batch_tokenizer
from realmops.corpus.vocabulary import Casing, build_tokenizer, open_tokenizer
from realmops.readers.documents import Document, Dropped, Outcome, Rejected, call_guarded

_REPEATED = 64 << 20  # characters; bounds the title and extra columns that every passage of a document repeats


def is_navigation_title(title: str) -> bool:
    """Return whether a Wikipedia article is a list, index, outline or disambiguation page, which REALM drops."""
    return title.startswith(("List of", "Index of", "Outline of")) or "(disambiguation)" in title


class DocumentCutter:
    """Callable that converts records to documents and cuts documents into passages.

    ``tokenizer`` is the content of a tokenizer.json; without it, ``vocabulary`` is that of BERT's WordPiece.
    ``earlier`` is the folder of an earlier snapshot whose unchanged documents are reused.
    """

    def __init__(
        self, vocabulary: Sequence[str], tokenizer: str | None, settings: dict[str, Any], earlier: Path | None
    ) -> None:
        casing = Casing(**settings["casing"])
        subword_tokenizer = open_tokenizer(tokenizer) if tokenizer else build_tokenizer(vocabulary, casing)
        self._tokenizer = build_batch_tokenizer(subword_tokenizer)
        prefix_length = len(SpecialTokens.of(subword_tokenizer).document) if tokenizer else 0
        self._block_wordpieces = None if settings["whole_documents"] else settings["block_wordpieces"] - prefix_length
        self._drop_titles = settings["drop_titles"]
        self._language = settings["language"]
        # snapshots of old versions lack document digests
        self._earlier_folder = earlier if earlier is not None and (earlier / DOCUMENTS).is_file() else None

    def __call__(self, records: Records, /) -> tuple[list[Outcome], PassageBatch]:
        """Return the outcome of each record, and the passages of the documents that have wordpieces."""
        outcomes = [self._admit(outcome) for outcome in parse_records(records)]
        documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        batch = call_guarded(partial(self._cut, documents), lambda _: None)
        if batch is None:  # retry one by one to reject the record that fails
            outcomes = [self._try(outcome) for outcome in outcomes]
            documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
            batch = self._cut(documents)
        passages = Counter(passage.document for passage in batch.passages)
        replaced = {id(document): _check_passages(document, passages[n]) for n, document in enumerate(documents)}
        if any(replaced.values()):
            outcomes = [replaced.get(id(outcome)) or outcome for outcome in outcomes]
            batch = self._cut([outcome for outcome in outcomes if isinstance(outcome, Document)])
        return outcomes, batch

    def _cut(self, documents: Sequence[Document]) -> PassageBatch:
        room = self._block_wordpieces
        cut = partial(cut_passages, tokenizer=self._tokenizer, block_wordpieces=room, language=self._language)
        return cut(documents) if self._earlier_folder is None else self._earlier.cut(documents, cut)

    @cached_property
    def _earlier(self) -> EarlierSnapshot:
        assert self._earlier_folder is not None
        return EarlierSnapshot(self._earlier_folder)

    def _try(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Document):
            return outcome
        failed = call_guarded(partial(self._cut, [outcome]), partial(Rejected, outcome.place))
        return failed if isinstance(failed, Rejected) else outcome

    def _admit(self, outcome: Outcome) -> Outcome:
        if self._drop_titles and isinstance(outcome, Document) and is_navigation_title(outcome.title):
            return Dropped(outcome.place, "navigation_title")
        return outcome


def _check_passages(document: Document, passages: int) -> Dropped | Rejected | None:
    """Return Dropped or Rejected for a document without passages or with too much repeated text, else None."""
    if passages == 0:
        return Dropped(document.place, "no_wordpieces")
    if passages * (len(document.title) + len(document.extra)) > _REPEATED:
        problem = f"title and extra columns, repeated in each of {passages:,} passages, are longer than "
        return Rejected(document.place, f"{problem}{_REPEATED >> 20} Mi characters in total; shorten them")
    return None
