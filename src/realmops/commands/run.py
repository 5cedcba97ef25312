"""``realmops run``: validate all inputs, then run stages in order."""

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from realmops.commands.questions import write_cloze_questions
from realmops.corpus.encoder_tokenizer import read_encoder_tokenizer
from realmops.hub import READER, T5, encoder_files, encoder_folder
from realmops.inputs.resolve import local_cache
from realmops.options import Options
from realmops.progress import Report
from realmops.refresh.child_processes import end_with
from realmops.stages import CLOZE_STEP, INIT, STAGES, resolve_models
from realmops.stages.check_inputs import check_inputs
from realmops.stages.option_inputs import FILES
from realmops.stages.run_inputs import take_inputs
from realmops.stages.runner import run_stage
from realmops.tracking.runs import UNTRACKED, WITHOUT_MLFLOW, has_mlflow


def run_stages(
    names: Collection[str],
    options: Options,
    *,
    presets: Sequence[str] = (),
    project: Path,
    root: Path,
    report: Report,
    force: bool,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run steps in order after all inputs are checked; yield name and metrics of each stage."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun: its workers would outlive it if it is killed
        end_with(os.getppid())
    names = tuple(names)
    options, _ = take_inputs(options, project, root, local_cache(), report, partial(_is_read, names))
    check_inputs(names, options, project, root)
    stages = [name for name in names if name in STAGES]
    for warning in (*check_encoders(stages, resolve_models(options, project)), *option_warnings(stages, options)):
        report.warn(warning)
    for name in names:
        if name == CLOZE_STEP:
            for line in write_cloze_questions(root, seed=options.run.seed):
                report.log(f"cloze: {line}")
        elif metrics := run_stage(
            name, options, presets=presets, project=project, root=root, report=report, force=force
        ):
            yield name, metrics


def _is_read(names: Sequence[str], key: str) -> bool:
    stages = [STAGES[name] for name in names if name in STAGES]
    return any(key in stage.files if key in FILES else stage.reads(key) for stage in stages)


def option_warnings(stages: Collection[str], options: Options) -> Iterator[str]:
    block, question = options.snapshot.block_wordpieces, options.finetune.query_wordpieces
    for name, extra in (("pretrain", 0), ("finetune", question)):
        if name in stages and (limit := options.get(f"{name}.reader_wordpieces")) < block:
            yield (
                f"passages have up to snapshot.block_wordpieces={block} wordpieces, but the reader truncates passage "
                f"and query together to {name}.reader_wordpieces={limit}: raise it to {block + extra} to read long "
                "passages to their end"
            )
    yield from _learning_rate_warnings(stages, options)
    if options.tracking.enabled and not set(stages) <= set(UNTRACKED) and not has_mlflow():
        yield WITHOUT_MLFLOW


FROM_SCRATCH, PRE_TRAINED = 2.5e-4, 2.0e-4  # lowest and highest learning rates of reader and tagger that trained well


def _learning_rate_warnings(stages: Collection[str], options: Options) -> Iterator[str]:
    """Yield a warning about learning rates for the other kind of encoder: from scratch or pre-trained."""
    init, is_small = options.retriever.init, options.retriever.init == "small"
    trained = {  # from the encoder: learning rates, and whether they are used
        "tag.learning_rate": options.tag.steps and options.tag.method == "tagger",
        "ict.reader_learning_rate": options.ict.reader_steps,
        "pretrain.reader_learning_rate": options.pretrain.steps,
        "finetune.reader_learning_rate": options.finetune.epochs and options.finetune.reads_passages,
    }
    rates = {key: options.get(key) for key, is_used in trained.items() if is_used and key.split(".")[0] in stages}
    unfit = [f"{key}={r:g}" for key, r in rates.items() if (r < FROM_SCRATCH if is_small else r > PRE_TRAINED)]
    if unfit:
        yield (
            f"retriever.init is {init}, {'an encoder from scratch' if is_small else 'a pre-trained encoder'}, but "
            f"{', '.join(unfit)} is for the other kind; change the preset of the encoder, or set "
            f"{f'{FROM_SCRATCH:g} or more' if is_small else f'{PRE_TRAINED:g} or less'}"
        )


def check_encoders(names: Collection[str], options: Options) -> list[str]:
    init, warnings = options.retriever.init, []
    if init != "small" and any(STAGES[name].reads(INIT) for name in names):
        from realmops.model.build import build_models
        from realmops.model.transformers_models import SUGGESTED_ENCODERS

        folder = encoder_folder(init)
        words, *_ = read_encoder_tokenizer(folder)
        _, built = build_models(options.bert, options.retriever, options.reader, len(words), seed=0)
        kind = built.encoder.model.config.model_type
        for key in ("ict.reader_steps", "pretrain.steps"):
            if built.masked_words is None and key.split(".")[0] in names and options.get(key):
                raise ValueError(
                    f"{folder}: a {kind} is a causal model, which cannot predict masked words and is supported only "
                    f"for retrieval; set {key}=0, or choose a bidirectional encoder, for example {SUGGESTED_ENCODERS}"
                )
        learns = options.ict.reader_steps or options.pretrain.steps
        if "ict" in names and learns and built.masked_words is not None and not built.masked_words.is_trained:
            warnings.append(
                f"{folder} has no masked word head: the reader's head starts untrained, over the word embeddings; set "
                "more ict.reader_steps than for a BERT with a pre-trained head"
            )
        if not built.encoder.packs:
            warnings.append(
                f"retriever.init is a {kind}, whose batches are padded: it is slower than a family that supports the "
                "attention interface of transformers, for example BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT"
            )
    if "finetune" in names and not options.finetune.reads_passages:
        encoder_files(options.closed_book.init, T5)
    elif "finetune" in names and options.reader.is_published:
        from realmops.model.extractive_reader import load_extractive_reader

        load_extractive_reader(encoder_folder(options.reader.init, READER), seed=0 if options.finetune.epochs else None)
    return warnings
