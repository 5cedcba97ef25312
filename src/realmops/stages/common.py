"""What several stages do the same way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from realmops import artifacts
from realmops.config import IndexOptions, QuestionFiles, RunOptions
from realmops.corpus.cloze import Sources
from realmops.corpus.question_sets import Question, in_languages, read_questions
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.model.retriever import Retriever, Tower
from realmops.search.approximate import QUERIES, approximate, passage_index
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.exact import PassageIndex, over_vectors
from realmops.stages import Job
from realmops.text.answer_matching import MATCH_SECONDS, expression
from realmops.text.spans import Spans
from realmops.train.checkpoints import FolderCheckpoints
from realmops.train.loop import Context
from realmops.train.parallel import team

T = TypeVar("T")


def questions_of(job: Job, snapshot: Snapshot, split: str) -> list[Question]:
    """The questions of ``questions.SPLIT``; warns where the corpus lacks passages that they were made from."""
    name = f"questions.{split}"
    found = read_questions([job.inputs[name]], format=job.section(QuestionFiles).format)
    questions = in_languages(found, snapshot.common_languages)
    lost, named = Sources(snapshot).lost(questions)
    if lost:
        job.report.warn(
            f"{job.inputs[name]}: {lost} of {named} passages that questions were made from are not in the corpus. If "
            "they are there in another form, with another id, they count as evidence, and recall and EM are too high: "
            "run realmops cloze again after a change of documents, encoder or the section snapshot"
        )
    return questions


@dataclass
class StageTrainings:
    """The trainings of a stage, whose lines stand one behind the other in its journal."""

    job: Job
    steps: int = 0  # of the trainings so far
    end: int = 0  # the journal's length behind them

    def context(self, stream: str, steps: int, label: str, prefix: str = "") -> Context:
        """The surroundings of the next one, with checkpoints in the stage's work folder and a progress bar."""
        job, run = self.job, self.job.section(RunOptions)
        device, dtype = device_and_dtype(run)
        found = Context(
            stream,
            run.seed,
            device,
            dtype,
            FolderCheckpoints(job.work / stream),
            job.journal,
            job.report.progress(label, steps),
            prefix,
            self.steps,
            self.end,
            team(),
            f"{job.journal.stage}: {label}",
        )
        self.steps += steps
        return found


def open_snapshot(job: Job, name: str = "corpus") -> Snapshot:
    return Snapshot.open(job.inputs["snapshot"] / name, verify=False)  # the stage's manifest was checked whole


def open_spans(job: Job, snapshot: Snapshot, name: str = "corpus") -> Spans:
    spans = Spans.open(job.inputs["tag"] / name, verify=False, corpus_hash=snapshot.corpus_hash)
    if spans.vocabulary_hash != snapshot.vocabulary_hash:
        raise ValueError(
            f"{spans.folder}: made with the vocabulary {spans.vocabulary_hash[:12]}, the snapshot has "
            f"{snapshot.vocabulary_hash[:12]}; run the tag stage again"
        )
    return spans


def searchable(job: Job, embedding_PE: Tensor, tower: Tower, queries: Sequence[np.ndarray], k: int) -> PassageIndex:
    """An index over embeddings as the section ``index`` wants it, its recall of the top k measured with the queries."""
    run = job.section(RunOptions)
    device, dtype = device_and_dtype(run)

    def embedded() -> Tensor:
        return embed(tower, query_sequences(queries), dtype)

    seed = artifacts.seed_for(run.seed, "index")
    vectors = embedding_PE.shape[1] // tower.width
    passages = over_vectors(
        embedding_PE,
        vectors,
        lambda rows: passage_index(rows, job.section(IndexOptions), device, seed, embedded, k * vectors),
    )
    if device.type == "cuda" and (structure := approximate(passages)) is not None:
        _say_once(job.report.say, f"{job.journal.stage}: index.type {structure.recipe.type} is on {structure.place}")
    return passages


@cache
def _say_once(say: Callable[[str], None], message: str) -> None:
    """Report a fact that is the same for every index of a run."""
    say(message)


def sampled(items: Sequence[T], seed: int) -> list[T]:
    """Those that the recall of an index is measured with."""
    rng = np.random.default_rng(artifacts.seed_for(seed, "index", "queries"))
    return [items[row] for row in rng.permutation(len(items))[:QUERIES]]


def question_queries(snapshot: Snapshot, questions: Sequence[Question], limit: int) -> list[np.ndarray]:
    """[CLS] question [SEP] of each question, tokenised here and once."""
    return text_queries(snapshot, [q.question for q in questions], limit)


def rank(
    retriever: Retriever, passages: PassageIndex, queries: Sequence[np.ndarray], k: int, dtype: torch.dtype
) -> np.ndarray:
    """Ids of the top k passages of each query, Q x k."""
    query = embed(retriever.query, query_sequences(queries), dtype)
    ids: np.ndarray = passages.search(query, k)[1].cpu().numpy()
    return ids


def warn_of_timeouts(job: Job, questions: Sequence[Question]) -> dict[str, int]:
    """Name the questions whose regular expressions took too long; their number as a metric, if there are any."""
    expressions = [question for question in questions if question.is_regex]
    slow = [q.id for q in expressions if any(expression(answer).timed_out for answer in q.answers)]
    if slow:
        job.report.warn(
            f"the regular expressions of {len(slow)} questions took longer than {MATCH_SECONDS:g} s for one text and "
            f"were given up, which counts as no match: {', '.join(slow)}; simplify them"
        )
    return {"regex_timeouts": len(slow)} if expressions else {}
