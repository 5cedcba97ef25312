"""Stage ``ict``: warm start of the retriever (inverse cloze task) and the reader (masked words)."""

from typing import Any

from realmops.devices import device_and_dtype
from realmops.journal import JournalValues
from realmops.model.build import build_models
from realmops.model.reader_files import save_models
from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS
from realmops.model.retriever_files import TextFormat
from realmops.options import ENCODER, BertOptions, Ict, ReaderOptions, RetrieverOptions, RunOptions
from realmops.stages import READER_SHAPE, Job
from realmops.stages.common import StageTrainings, open_snapshot, open_spans
from realmops.train.held_out_sentences import held_out_rows
from realmops.train.initialisation import init_lexical_features, init_towers
from realmops.train.inverse_cloze import ict_steps, train_reader, train_retriever


def run(job: Job) -> dict[str, Any]:
    """Train both models one after the other and write them; return the accuracies of the last steps."""
    run_options = job.section(RunOptions)
    corpus = open_snapshot(job)
    has_warmup = (job.inputs["snapshot"] / "warmup").is_dir()
    text = open_snapshot(job, "warmup") if has_warmup else corpus
    requested: Ict = job.section(Ict)
    steps, reader_steps = ict_steps(len(corpus), requested)[0], ict_steps(len(text), requested)[1]
    options = requested.model_copy(update={"steps": steps, "reader_steps": reader_steps})
    spans = open_spans(job, text, text.folder.name) if options.reader_steps else None
    size = corpus.tokenizer.get_vocab_size()
    towers = job.section(RetrieverOptions)
    reads = ReaderOptions(init=ENCODER, **{key.partition(".")[2]: job.sections[key] for key in READER_SHAPE})
    bert, seed = job.section(BertOptions), run_options.seed
    retriever, reader = build_models(bert, towers, reads, size, seed, job.report.warn)
    if towers.hybrid:
        retriever.mixture = DEFAULT_FUSION_WEIGHTS
    init_towers(retriever, corpus, seed, job.report.progress)
    job.report.log(f"ict: the retriever is {retriever.query.description}")
    init_lexical_features(reader, corpus, run_options.seed, job.report.progress)
    device, dtype = device_and_dtype(run_options, retriever)
    reader_dtype = device_and_dtype(run_options, reader)[1]
    retriever.to(device).train()
    reader.to(device).train()
    trainings = StageTrainings(job)
    context = trainings.context(dtype, "ict", options.steps, "inverse cloze task")
    train_retriever(context, retriever, corpus, options)
    if spans is not None:
        context = trainings.context(reader_dtype, "warm_start", options.reader_steps, "reader's warm start", "reader_")
        held_out = () if has_warmup else held_out_rows(len(spans.rows), run_options.seed)  # held out in pretrain
        limit = job.sections["pretrain.reader_wordpieces"]
        train_reader(context, reader, text, spans, options, limit, held_out, job.work)
    if not context.processes.is_main_process:
        return {}
    save_models(job.out, retriever, reader, TextFormat.of(corpus))
    names = ("accuracy_removed", "accuracy_kept", "reader_loss")
    logged = JournalValues(job.journal)
    return {name: logged.mean(name, last=20) for name in names}
