"""Relevant passages of a question: those of its judged documents, or else those with an answer in their text."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.snapshot_reader import Snapshot
from realmops.questions.answer_matching import contains_answer
from realmops.questions.question_sets import JUDGED_RULE, Question


class RelevantPassages:
    """Lookup of relevant passages and documents in a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def is_relevant(self, question: Question, passage: int) -> bool:
        """Return whether a passage is relevant to a question by its match rule; -1 is no passage."""
        if passage < 0:
            return False
        if question.match_rule == JUDGED_RULE:
            return dict(question.relevant).get(self._snapshot.document_id(passage), 0) > 0
        return contains_answer(self._snapshot.text(passage), question.answers, question.match_rule)

    def passages_of_documents(self, question: Question) -> list[NDArray[np.int64]]:
        relevant = [document for document, grade in question.relevant if grade > 0]
        return [self._passages(document) for document in relevant if document in self._number_of]

    def qrels(self, questions: Sequence[Question]) -> dict[str, dict[str, int]]:
        """Return the grades of documents by question id; the grade of a passage is that of its document.

        A question of which no judged document is in the corpus is left out, unless it has judgements alone.
        """
        qrels: dict[str, dict[str, int]] = {}
        for question in questions:
            grades: dict[str, int] = {}
            for name, grade in question.judgements.items():
                document = name if name in self._number_of else self._document_of_passage.get(name, name)
                grades[document] = max(grade, grades.get(document, grade))
            if question.match_rule == JUDGED_RULE or any(document in self._number_of for document in grades):
                qrels[question.id] = grades
        return qrels

    def missing(self, qrels: dict[str, dict[str, int]]) -> int:
        grades = (item for judged in qrels.values() for item in judged.items())
        return sum(grade > 0 and document not in self._number_of for document, grade in grades)

    @cached_property
    def document_of(self) -> list[str]:
        return [self._encoded[0][number] for number in self._encoded[1].tolist()]

    @cached_property
    def largest_documents(self) -> NDArray[np.int64]:
        return np.sort(np.bincount(self._encoded[1]))[::-1]

    def _passages(self, document: str) -> NDArray[np.int64]:
        order_P, ends = self._passages_by_document
        number = self._number_of[document]
        passages: NDArray[np.int64] = order_P[ends[number - 1] if number else 0 : ends[number]]
        return passages

    @cached_property
    def _encoded(self) -> tuple[list[str], NDArray[np.int32]]:
        return self._snapshot.dictionary_encode("document_id")

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._encoded[0])}

    @cached_property
    def _passages_by_document(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Passages sorted by document [P], and the end of each document among them."""
        return np.argsort(self._encoded[1], kind="stable"), np.cumsum(np.bincount(self._encoded[1]))

    @cached_property
    def _document_of_passage(self) -> dict[str, str]:
        return dict(zip(self._snapshot.column("passage_id"), self.document_of, strict=True))
