"""Stage ``finetune``: open-domain question answering over the frozen passages of the chosen retriever."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from realmops.config import Finetune
from realmops.corpus.questions import read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.openqa import score_predictions
from realmops.model.files import add_spans, load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.common import JournalValues, context, embed_corpus, open_snapshot, prepare
from realmops.train.finetune import OpenQa, finetune

INDEX = "index.safetensors"


def start_models(job: Job, snapshot: Snapshot, options: Finetune) -> tuple[Retriever, Reader]:
    """Retriever and reader from the stages that the options name, the query tower apart from the passages'."""
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
    questions = read_questions([job.inputs["questions.train"]])
    held_out = read_questions([job.inputs["questions.dev"]])
    retriever, reader = start_models(job, snapshot, options)
    add_spans(reader, options.span_width, seed)
    retriever.to(device)
    reader.to(device)
    embedding = embed_corpus(retriever, snapshot, dtype)
    model = OpenQa(retriever, reader, snapshot, embedding, options, dtype)
    steps = options.epochs * -(-len(questions) // options.batch_size)
    finetune(context(job, "finetune", steps, "fine-tuning"), model, questions, options, job.sections["optimiser"])
    _save(job.out, model, embedding, snapshot)
    answers = model.answer(
        held_out, ranked=5, batch_size=32, progress=job.report.progress("dev questions", len(held_out))
    )
    predictions = {q.id: a.text for q, a in zip(held_out, answers, strict=True)}
    logged = JournalValues(job)
    return {
        "dev_em": score_predictions(held_out, predictions, seed=seed).em.mean,
        "span_loss": logged.mean("span_loss", last=50),
        "early_loss": logged.mean("early_loss", last=50),
        "no_correct_span": logged.mean("no_correct_span", last=50),
        "questions": len(questions),
    }


def _save(folder: Path, model: OpenQa, embedding: Tensor, snapshot: Snapshot) -> None:
    save_models(folder, model.retriever, model.reader, snapshot.vocabulary_hash)
    (folder / INDEX).write_bytes(save_tensors({"embeddings": embedding.cpu().contiguous()}))
