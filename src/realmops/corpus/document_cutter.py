"""Conversion of records to documents and passages: the task of a worker process of the snapshot writer."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from realmops.corpus.ingest import Batch, parse_records
from realmops.corpus.npy_files import load_npy
from realmops.corpus.passages import Passage, PassageBatch, cut_passages, passage_digest, text_digest
from realmops.corpus.snapshot_reader import DOCUMENTS, Snapshot, map_texts
from realmops.corpus.special_tokens import SpecialTokens
from realmops.corpus.tokenizer import build_batch_tokenizer
from realmops.corpus.vocabulary import Casing, build_tokenizer, open_tokenizer
from realmops.readers.documents import Document, Dropped, Outcome, Rejected, call_guarded

# Shape legend: D documents of the earlier snapshot, P its passages.

_REPEATED = 64 << 20  # characters; bounds the title and extra columns that every passage of a document repeats


def is_navigation_title(title: str) -> bool:
    """Return whether a Wikipedia article is a list, index, outline or disambiguation page, which REALM drops."""
    return title.startswith(("List of", "Index of", "Outline of")) or "(disambiguation)" in title


class DocumentCutter:
    """Callable that converts records to documents and cuts documents into passages."""

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
        self._earlier_folder = earlier

    def __call__(self, records: Batch, /) -> tuple[list[Outcome], PassageBatch]:
        """Return the outcome of each record, and the passages of the documents that have wordpieces."""
        outcomes = [self._admit(outcome) for outcome in parse_records(records)]
        documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        batch = call_guarded(partial(self._cut, documents), "")
        if isinstance(batch, Rejected):  # retry one by one to reject the record that fails
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
    def _earlier(self) -> "EarlierSnapshot":
        assert self._earlier_folder is not None
        return EarlierSnapshot(self._earlier_folder)

    def _try(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Document):
            return outcome
        batch = call_guarded(partial(self._cut, [outcome]), outcome.place)
        return batch if isinstance(batch, Rejected) else outcome

    def _admit(self, outcome: Outcome) -> Outcome:
        if self._drop_titles and isinstance(outcome, Document) and is_navigation_title(outcome.title):
            return Dropped(outcome.place, "navigation_title")
        return outcome


def _check_passages(document: Document, passages: int) -> Dropped | Rejected | None:
    if passages == 0:
        return Dropped(document.place, "no_wordpieces")
    if passages * (len(document.title) + len(document.extra)) > _REPEATED:
        problem = f"title and extra columns, repeated in each of {passages:,} passages, are longer than "
        return Rejected(document.place, f"{problem}{_REPEATED >> 20} Mi characters in total; shorten them")
    return None


class EarlierSnapshot:
    """An earlier snapshot with the same tokenizer and settings; a document is found by digest of title and text."""

    def __init__(self, folder: Path) -> None:
        self._snapshot = Snapshot.open(folder, verify=False)
        digest_D2 = load_npy(folder / DOCUMENTS)
        self._order_D = np.lexsort((digest_D2[:, 1], digest_D2[:, 0]))
        self._digest_D2 = digest_D2[self._order_D]
        self._first_D = np.searchsorted(self._snapshot.places[:, 0], np.arange(len(digest_D2) + 1))
        self._length_P = pc.utf8_length(map_texts(folder).column("text")).to_numpy()

    def cut(self, documents: Sequence[Document], cut: Callable[[Sequence[Document]], PassageBatch]) -> PassageBatch:
        digests = [text_digest(document.title, document.text) for document in documents]
        numbers = self._numbers(digests)
        fresh = cut([document for document, number in zip(documents, numbers, strict=True) if number < 0])
        fresh_passages = {index: list(group) for index, group in groupby(fresh.passages, lambda p: p.document)}
        old, new = self._snapshot, 0
        batch = PassageBatch([], [], [], digests)
        for index, (document, number) in enumerate(zip(documents, numbers, strict=True)):
            if number < 0:
                batch.passages.extend(replace(passage, document=index) for passage in fresh_passages.get(new, ()))
                batch.titles.append(fresh.titles[new])
                batch.languages.append(fresh.languages[new])
                new += 1
                continue
            first, end = self._first_D[number], self._first_D[number + 1]
            for row in range(first, end):
                chars = old.start(row), old.start(row) + int(self._length_P[row])
                digest = passage_digest(document.title, document.text[slice(*chars)])
                arrays = old.body(row).astype(np.int32), old.chars(row), old.sentences(row)
                batch.passages.append(Passage(index, chars, digest, *arrays))
            batch.titles.append(old.title_tokens(first).tolist())
            batch.languages.append(old.language_of(first))
        return batch

    def _numbers(self, digests: Sequence[bytes]) -> list[int]:
        """Return the number of each document in the earlier snapshot, -1 if it is missing there."""
        query_N2 = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        index_N = np.searchsorted(self._digest_D2[:, 0], query_N2[:, 0]).clip(max=len(self._digest_D2) - 1)
        is_equal_N = (self._digest_D2[index_N] == query_N2).all(axis=1)
        numbers: list[int] = np.where(is_equal_N, self._order_D[index_N], -1).tolist()
        return numbers
