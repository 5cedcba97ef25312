"""Stage ``finetune``: open-domain question answering over the frozen passages of the chosen retriever."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from realmops.config import Finetune
from realmops.corpus.questions import read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.openqa import score_predictions
from realmops.model.files import add_spans, load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.common import (
    INDEX,
    JournalValues,
    context,
    open_snapshot,
    passage_embeddings,
    prepare,
    save_index,
    warn_of_timeouts,
)
from realmops.train.finetune import ANSWERED_TOGETHER, OpenQa, finetune, finetune_steps


def start_models(job: Job, snapshot: Snapshot, options: Finetune) -> tuple[Retriever, Reader]:
    """Retriever and reader from the stages that the options name, the query tower apart from the passages'."""
    for key, name in (("retriever", options.retriever), ("reader", options.reader)):
        if name not in job.inputs:
            raise ValueError(
                f"finetune.{key} is {name!r}, but that stage was not run; run it or set finetune.{key}=pretrain"
            )
    models = {
        name: load_models(job.inputs[name], snapshot.vocabulary_hash) for name in {options.retriever, options.reader}
    }
    retriever, reader = models[options.retriever][0], models[options.reader][1]
    return Retriever(copy.deepcopy(retriever.query), retriever.document), reader


def run(job: Job) -> dict[str, Any]:
    """Fine-tune, write models and passage embeddings; returns losses and exact match on the dev questions."""
    options: Finetune = job.sections["finetune"]
    seed = job.sections["run"].seed
    device, dtype = prepare(job.sections["run"])
    snapshot = open_snapshot(job)
    form = job.sections["questions"].format
    questions = read_questions([job.inputs["questions.train"]], format=form)
    held_out = read_questions([job.inputs["questions.dev"]], format=form)
    retriever, reader = start_models(job, snapshot, options)
    add_spans(reader, options.span_width, seed)
    retriever.to(device)
    reader.to(device)
    embedding = passage_embeddings(job.inputs[options.retriever], retriever, snapshot, dtype)
    model = OpenQa(retriever, reader, snapshot, embedding, options, dtype)
    steps = finetune_steps(len(questions), options)
    finetune(context(job, "finetune", steps, "fine-tuning"), model, questions, options, job.sections["optimiser"])
    _save(job.out, model, embedding, snapshot)
    answers = model.answer(
        held_out, ranked=5, batch_size=ANSWERED_TOGETHER, progress=job.report.progress("dev questions", len(held_out))
    )
    predictions = {q.id: a.text for q, a in zip(held_out, answers, strict=True)}
    logged = JournalValues(job)
    return {
        "dev_em": score_predictions(held_out, predictions, seed=seed).em.mean,
        "span_loss": logged.mean("span_loss", last=50),
        "early_loss": logged.mean("early_loss", last=50),
        "no_correct_span": logged.mean("no_correct_span", last=50),
        "questions": len(questions),
        **warn_of_timeouts(job, [*questions, *held_out]),
    }


def _save(folder: Path, model: OpenQa, embedding: Tensor, snapshot: Snapshot) -> None:
    save_models(folder, model.retriever, model.reader, snapshot.vocabulary_hash)
    save_index(folder / INDEX, embedding)
