"""``realmops run``: stages one after another, and how they end with the process that started them."""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.commands.questions import make_cloze
from realmops.config import CLOSED_BOOK, Values, parse_section
from realmops.corpus.conll import read_conll
from realmops.corpus.formats import sources
from realmops.corpus.pretrained import read_encoder_tokenizer
from realmops.corpus.questions import read_questions
from realmops.encoders.families import PACKED
from realmops.encoders.folders import CONFIG, T5, encoder_files, encoder_folder, read_config
from realmops.index.process import end_with
from realmops.stages import CLOZE, STAGES, Report, check_files, external_files, in_use, named_below
from realmops.stages.runner import run_stage


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
    look_at_encoders(names, values)
    for note in notes(names, values):
        report.warn(note)
    if any("bert" in STAGES[name].sections for name in names) and (init := values["bert"]["init"]) != "small":
        for note in encoder_notes(encoder_folder(init)):
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


def encoder_notes(folder: Path) -> Iterator[str]:
    """What is worth knowing of an encoder before it begins; ValueError where it cannot work here."""
    config = read_config(folder)
    kind = config.get("model_type", "bert")
    if kind in PACKED:
        return
    from realmops.encoders.foreign import refuse

    refuse(config, str(folder / CONFIG))
    yield (
        f"bert.init is a {kind}, which transformers computes: batches are padded, and it is slower than a BERT, "
        "RoBERTa, XLM-R, MPNet, DistilBERT, ELECTRA or ModernBERT of its size"
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


def look_at_encoders(names: Collection[str], values: Values) -> None:
    """Open the pre-trained encoder that one of these stages wants, as ``ict`` does, and find T5's files."""
    init = values["bert"]["init"]
    if init != "small" and any("bert" in STAGES[name].sections for name in names):
        from realmops.model.files import build_models

        words, *_ = read_encoder_tokenizer(encoder_folder(init))
        bert, retriever, reader = (parse_section(name, values[name]) for name in ("bert", "retriever", "reader"))
        build_models(bert, retriever, reader, len(words), seed=0)
    if "finetune" in names and values["finetune"]["reader"] in CLOSED_BOOK:
        encoder_files(values["closed_book"]["init"], T5)
