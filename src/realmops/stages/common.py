"""Helpers shared by several stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from realmops import artifacts
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.devices import device_and_dtype, resolve_device
from realmops.model.retriever import Retriever, Tower
from realmops.options import IndexOptions, Optimiser, RunOptions
from realmops.questions.answer_matching import MATCH_SECONDS, compile_expression
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import Question, assign_languages, read_questions
from realmops.search.approximate import RECALL_QUERIES, index_type, passage_index
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.exact import PassageIndex, multi_vector_index
from realmops.stages import MACHINE, Job
from realmops.train.loop import FolderCheckpoints, TrainingContext
from realmops.train.parallel import process_group

T = TypeVar("T")


def load_questions(job: Job, snapshot: Snapshot, split: str) -> list[Question]:
    """Return the questions of a split; warn if source passages of generated questions are missing in the corpus."""
    name = f"questions.{split}"
    if name not in job.inputs:
        return []
    records = read_questions([job.inputs[name]])
    questions = assign_languages(records, snapshot.common_languages)
    missing, total = SourcePassages(snapshot).lost(questions)
    if missing:
        job.report.warn(
            f"{job.inputs[name]}: {missing} of {total} source passages of generated questions are not in the corpus. "
            "If the corpus has them with another id, they count as evidence, and recall is too high: run "
            "realmops run cloze again after a change of documents, encoder or the section snapshot"
        )
    return questions


def load_unanswerable(job: Job, snapshot: Snapshot, split: str) -> list[Question]:
    questions: list[Question] = []
    if (name := f"questions.{split}") in job.inputs:
        read_questions([job.inputs[name]], unanswerable=questions)
    return assign_languages(questions, snapshot.common_languages)


@dataclass
class StageTrainings:
    """The consecutive trainings of a stage, which share its journal."""

    job: Job
    steps: int = 0  # total of the trainings so far

    def context(self, dtype: torch.dtype, stream: str, steps: int, label: str, prefix: str = "") -> TrainingContext:
        """Build the context of the next training, with checkpoints in the stage's work folder and a progress bar."""
        job, run = self.job, self.job.section(RunOptions)
        context = TrainingContext(
            stream,
            run.seed,
            resolve_device(run.device),
            dtype,
            FolderCheckpoints(job.work / stream),
            job.journal,
            job.report.progress(label, steps),
            job.section(Optimiser),
            prefix,
            self.steps,
            process_group(),
            f"{job.journal.stage}: {label}",
            run.checkpoint_every,
        )
        self.steps += steps
        return context


def open_snapshot(job: Job, name: str = "corpus") -> Snapshot:
    return Snapshot.open(job.inputs["snapshot"] / name, verify=False)  # verified with the manifest of its stage


def open_spans(job: Job, snapshot: Snapshot, name: str = "corpus") -> Spans:
    """Open the salient spans of a snapshot; ValueError if they were computed with another vocabulary."""
    spans = Spans.open(job.inputs["tag"] / name, verify=False, corpus_hash=snapshot.corpus_hash)
    if spans.vocabulary_hash != snapshot.vocabulary_hash:
        raise ValueError(
            f"{spans.folder} was computed with the vocabulary {spans.vocabulary_hash[:12]}, but the snapshot has "
            f"{snapshot.vocabulary_hash[:12]}; run the tag stage again"
        )
    return spans


def index_options(job: Job, vectors: int, width: int, device: torch.device) -> IndexOptions:
    """Return the section ``index`` with its type; a resumed stage keeps the one that ``auto`` selected by memory."""
    options, path = job.section(IndexOptions), job.work / MACHINE
    machine = artifacts.read_json(path)
    if "index_type" not in machine:
        machine["index_type"] = index_type(options, vectors, width, device)
        artifacts.write_json(path, machine)
    return options.model_copy(update={"type": machine["index_type"]})


def build_index(job: Job, embedding_PE: Tensor, tower: Tower, queries: Sequence[np.ndarray], k: int) -> PassageIndex:
    """Build the index of the section ``index`` over embeddings, and measure its recall of the top k on the queries."""
    run = job.section(RunOptions)
    device, dtype = device_and_dtype(run, tower)

    def embed_queries() -> Tensor:
        return embed(tower, query_sequences(queries), dtype)

    seed = artifacts.seed_for(run.seed, "index")
    vectors = embedding_PE.shape[1] // tower.width
    options = index_options(job, len(embedding_PE) * vectors, tower.width, device)
    return multi_vector_index(
        embedding_PE, vectors, lambda rows: passage_index(rows, options, device, seed, embed_queries, k * vectors)
    )


def sample_queries(items: Sequence[T], seed: int) -> list[T]:
    """Return a random sample of at most ``RECALL_QUERIES`` items, for measuring the recall of an index."""
    rng = np.random.default_rng(artifacts.seed_for(seed, "index", "queries"))
    return [items[row] for row in rng.permutation(len(items))[:RECALL_QUERIES]]


def question_queries(snapshot: Snapshot, questions: Sequence[Question], limit: int) -> list[np.ndarray]:
    return text_queries(snapshot, [q.question for q in questions], limit)


def rank_passages(
    retriever: Retriever, passages: PassageIndex, queries: Sequence[np.ndarray], k: int, dtype: torch.dtype
) -> np.ndarray:
    query = embed(retriever.query, query_sequences(queries), dtype)
    ids: np.ndarray = passages.search(query, k)[1].cpu().numpy()
    return ids


def warn_of_timeouts(job: Job, questions: Sequence[Question]) -> dict[str, int]:
    """Warn of questions whose regular expressions timed out, and return their number as a metric."""
    expressions = [question for question in questions if question.is_regex]
    slow = [q.id for q in expressions if any(compile_expression(answer).timed_out for answer in q.answers)]
    if slow:
        job.report.warn(
            f"the regular expressions of {len(slow)} questions timed out after {MATCH_SECONDS:g} s on one text, which "
            f"counts as no match: {', '.join(slow)}; simplify them"
        )
    return {"regex_timeouts": len(slow)} if expressions else {}
