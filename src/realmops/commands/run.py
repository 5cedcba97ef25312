"""``realmops run``: stages one after another, and how they end with the process that started them."""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.commands.questions import make_cloze
from realmops.config import CLOSED_BOOK, Values, parse_section
from realmops.corpus.formats import sources
from realmops.corpus.question_sets import read_questions
from realmops.hub import T5, encoder_files, encoder_folder
from realmops.refresh.child_processes import end_with
from realmops.stages import CLOZE, STAGES, Report, check_files, external_files, in_use, named_below
from realmops.stages.runner import run_stage
from realmops.text.conll import read_conll
from realmops.text.pretrained import read_encoder_tokenizer


def run_stages(
    names: Collection[str],
    values: Values,
    *,
    presets: Sequence[str] = (),
    project: Path,
    root: Path,
    report: Report,
    force: bool,
    watch_parent: int | None = None,
    alone: str | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run stages as ``run_stage`` does; the name and the metrics of each, which a process that only helps has not.

    The files that they want from outside are read before the first one begins, and the encoder is opened: what the last
    of them would refuse costs nothing. Behind the stage tag questions are made from the corpus, where a later stage
    reads such. Of all stages this process may have to run one ``alone``.
    """
    if watch_parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
        watch_parent = os.getppid()  # torchrun, whose processes outlive it when it is killed
    if watch_parent is not None:
        end_with(watch_parent)
    names = tuple(names)
    if alone in (None, names[0]):
        _look_ahead(names, values, project, root, report)
    for name in names if alone is None else (alone,):
        metrics = run_stage(name, values, presets=presets, project=project, root=root, report=report, force=force)
        if metrics:
            yield name, metrics
        if name == "tag" and named_below(CLOZE, names, values):
            for line in make_cloze(root, None, seed=values["run"]["seed"]):
                report.say(f"cloze: {line}")


def _look_ahead(names: Sequence[str], values: Values, project: Path, root: Path, report: Report) -> None:
    check_files(names, values, project, root)
    files = {
        key: path
        for name in names
        for key, path in external_files(STAGES[name], values, project, root).items()
        if key in in_use(STAGES[name], values) and path.exists()
    }
    for key, path in files.items():  # each once
        look_at(key, path, values)
    for note in (*check_encoders(names, values), *notes(names, values)):
        report.warn(note)


def notes(stages: Collection[str], values: Values) -> Iterator[str]:
    """Yield warnings about options of these stages that are allowed and seldom intended."""
    block, question = values["snapshot"]["block_wordpieces"], values["finetune"]["query_wordpieces"]
    for name, beside in (("pretrain", 0), ("finetune", question)):
        if name in stages and (limit := values[name]["reader_wordpieces"]) < block:
            yield (
                f"passages have up to snapshot.block_wordpieces={block} wordpieces, and the reader sees no more than "
                f"{name}.reader_wordpieces={limit} of one and the text beside it: raise that to {block + beside}, or "
                "the ends of long passages are not read"
            )
    yield from _rates(stages, values)


FROM_SCRATCH, PRE_TRAINED = 2.5e-4, 2.0e-4  # least and most of a reader's and a tagger's learning rate that went well
_RATES = (  # of what starts as the encoder: the stage, its key, and the key without which nothing learns by it
    ("tag", "learning_rate", "steps"),
    ("ict", "reader_learning_rate", "reader_steps"),
    ("pretrain", "reader_learning_rate", "steps"),
    ("finetune", "reader_learning_rate", "epochs"),
)


def _rates(stages: Collection[str], values: Values) -> Iterator[str]:
    """Yield a warning about learning rates that suit the other kind of encoder."""
    init = values["bert"]["init"]
    idle = {"tag"} if values["tag"]["method"] != "tagger" else set()
    idle |= {"finetune"} if values["finetune"]["reader"] in CLOSED_BOOK else set()
    rates = {
        f"{stage}.{key}": values[stage][key]
        for stage, key, amount in _RATES
        if stage in stages and stage not in idle and values[stage][amount]
    }
    low = [f"{key}={rate:g}" for key, rate in rates.items() if rate < FROM_SCRATCH]
    high = [f"{key}={rate:g}" for key, rate in rates.items() if rate > PRE_TRAINED]
    if init == "small" and low:
        yield (
            f"bert.init is small, an encoder from scratch, and {', '.join(low)} suits one that is pre-trained: the "
            f"model may learn little. Leave out the preset for such an encoder, or set {FROM_SCRATCH:g} or more"
        )
    if init != "small" and high:
        yield (
            f"bert.init is {init}, a pre-trained encoder, and {', '.join(high)} suits one from scratch: it may forget "
            f"what it knows. Add a preset for such an encoder, as minilm, or set {PRE_TRAINED:g} or less"
        )


def look_at(key: str, path: Path, values: Values) -> None:
    """Read what an option names as the stage will that wants it; ValueError now for what would end that then."""
    if key == "snapshot.documents":
        sources(path, values["snapshot"]["format"])
    elif key == "snapshot.warmup":
        sources(path, "auto")
    elif key.startswith("questions."):
        read_questions([path], format=values["questions"]["format"])
    elif key == "reader.init":
        artifacts.read_manifest(path, "export")
    elif key.startswith("tag."):
        read_conll(path)


def check_encoders(names: Collection[str], values: Values) -> list[str]:
    """Open the pre-trained encoder that one of these stages requires, as ``ict`` does, and find T5's files.

    Returns:
        What is worth knowing of the encoder before a stage begins.

    Raises:
        ValueError: the encoder cannot work here, or not with these options.
    """
    init, about = values["bert"]["init"], []
    if init != "small" and any("bert" in STAGES[name].sections for name in names):
        from realmops.model.checkpoint_files import build_models
        from realmops.model.transformers_models import USUAL

        folder = encoder_folder(init)
        words, *_ = read_encoder_tokenizer(folder)
        bert, retriever, reader = (parse_section(name, values[name]) for name in ("bert", "retriever", "reader"))
        _, built = build_models(bert, retriever, reader, len(words), seed=0)
        kind = built.encoder.model.config.model_type
        steps = {"ict": "ict.reader_steps", "pretrain": "pretrain.steps"}
        for stage, key in steps.items():
            section, _, name = key.partition(".")
            if built.masked_words is None and stage in names and values[section][name]:
                raise ValueError(
                    f"{folder}: a {kind} continues texts and sees no word after a mask, so it predicts no masked "
                    f"words and may retrieve alone; set {key}=0, or choose an encoder, for example {USUAL}"
                )
        if not built.encoder.packs:
            about.append(
                f"bert.init is a {kind}, whose batches are padded: it is slower than a family of transformers that "
                "supports its attention interface, for example BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT"
            )
    if "finetune" in names and values["finetune"]["reader"] in CLOSED_BOOK:
        encoder_files(values["closed_book"]["init"], T5)
    return about
