"""Stage ``ict``: warm starts of retriever and reader."""

from statistics import fmean
from typing import Any

from realmops.config import BertOptions, Ict, Optimiser, ReaderOptions, RetrieverOptions, RunOptions
from realmops.devices import device_and_dtype
from realmops.journal import JournalValues
from realmops.model.checkpoint_files import build_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import HYBRID_START, Retriever
from realmops.search.corpus_statistics import start_from_passages, start_matches
from realmops.stages import Job
from realmops.stages.common import StageTrainings, open_snapshot, open_spans
from realmops.train.held_out import held_out_rows
from realmops.train.inverse_cloze import steps_over, train_reader, train_retriever

ENDS = 10  # steps at the beginning and at the end, which tell what crops brought
CHANCE = 0.03  # a difference of these shares that means nothing


def run(job: Job) -> dict[str, Any]:
    """Train both models one after the other and write them; returns the accuracies of the last steps."""
    run_options = job.section(RunOptions)
    device, dtype = device_and_dtype(run_options)
    corpus = open_snapshot(job)
    has_warmup = (job.inputs["snapshot"] / "warmup").is_dir()
    text = open_snapshot(job, "warmup") if has_warmup else corpus
    wanted: Ict = job.section(Ict)
    steps, reader_steps = steps_over(len(corpus), wanted)[0], steps_over(len(text), wanted)[1]
    options = wanted.model_copy(update={"steps": steps, "reader_steps": reader_steps})
    spans = open_spans(job, text, text.folder.name) if options.reader_steps else None
    size = corpus.tokenizer.get_vocab_size()
    towers = job.section(RetrieverOptions)

    def started() -> tuple[Retriever, Reader]:
        retriever, reader = build_models(
            job.section(BertOptions), towers, job.section(ReaderOptions), size, run_options.seed, job.report.warn
        )
        if towers.hybrid:
            retriever.mixture = HYBRID_START
        retriever.to(device).train()
        start_from_passages(retriever, corpus, dtype, run_options.seed, job.report.progress)
        return retriever, reader

    retriever, reader = started()
    job.report.say(f"ict: the retriever is {retriever.query.words}")
    start_matches(reader, corpus, run_options.seed, job.report.progress)
    reader.to(device).train()
    optimiser = job.section(Optimiser)
    trainings = StageTrainings(job)
    surroundings = trainings.context("ict", options.steps, "inverse cloze task")
    trainings.end = train_retriever(surroundings, retriever, corpus, options, optimiser)
    if spans is not None:
        surroundings = trainings.context("warm_start", options.reader_steps, "reader's warm start", "reader_")
        held_out = () if has_warmup else held_out_rows(len(spans.rows), run_options.seed).tolist()  # pretrain's
        train_reader(surroundings, reader, text, spans, options, optimiser, held_out, job.work)
    if not surroundings.team.leads:
        return {}
    if wanted.task == "crop" and options.steps and not crops_helped(job):
        retriever = started()[0]
    save_models(job.out, retriever, reader, corpus.vocabulary_hash, corpus.tokenizer)
    names = ("accuracy_removed", "accuracy_kept", "reader_loss")
    logged = JournalValues(job.journal)
    return {name: logged.mean(name, last=20) for name in names}


def crops_helped(job: Job) -> bool:
    """Say how many crops found their passage at the beginning and at the end; False where they became fewer.

    Short trainings do not tell. Most passages of the last steps were not seen before, or once.
    """
    logged = JournalValues(job.journal)
    found = [values for name in ("accuracy_kept", "accuracy_removed") if len(values := logged.of(name)) >= 2 * ENDS]
    if not found:
        return True
    first, last = (fmean(fmean(values[part]) for values in found) for part in (slice(ENDS), slice(-ENDS, None)))
    job.report.say(
        f"ict: {first:.2f} of the crops found their passage among those of their batch in the first {ENDS} steps, "
        f"{last:.2f} in the last"
    )
    if last < first - CHANCE:
        job.report.warn("crops made the retriever find less, so it stays as it came; try a lower ict.learning_rate")
        return False
    if last < first + CHANCE:
        job.report.say("ict: the retriever knew documents like these; ict.steps=0 keeps it as it came and is faster")
    return True
