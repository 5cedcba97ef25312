"""The models of a new project: encoder, reader and name tagger, by availability and documents."""

from pathlib import Path

from realmops import hub
from realmops.corpus.languages import ENGLISH
from realmops.inputs.resolve import check_hub_name
from realmops.options import NO_READER
from realmops.starter.new_project import Project, path_in_params

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # retriever.init of the preset minilm
# Readers that init proposes: a small one and a better one.
READERS = "distilbert/distilbert-base-cased-distilled-squad", "deepset/roberta-base-squad2"
MULTILINGUAL_READERS = ("deepset/xlm-roberta-base-squad2",)
WIDE = 768  # hidden size from which an encoder needs the learning rates of the preset base
UNTRAINED = "untrained"  # the last preset of a project whose models were not trained here
LARGE = 20_000_000  # bytes, about 20,000 passages; from scratch, the preset large pays off from here


def check_model(option: str, name: str, family: hub.ModelFamily) -> None:
    """Raise ValueError unless a model is a complete folder, in the hub's cache, or on the hub."""
    if Path(name).is_dir():
        hub.encoder_folder(name, family)
        return
    check_hub_name(name, Path())
    if not (hub.is_cached(name) or hub.describe_model(name)):
        raise ValueError(
            f"{option} is {name!r}: no such folder, not in the hub's cache, and the hub does not have it or cannot be "
            "reached; give the folder of a model, or check the name and the network"
        )


def choose_model(project: Project, encoder: str | None, size: int) -> list[str]:
    """Return the presets of the model, by encoder and size of the documents in bytes."""
    is_available = hub.is_cached(ENCODER) or hub.describe_model(ENCODER) if encoder is None else True
    chosen = encoder or (ENCODER if is_available else "small")
    if chosen == "small":
        reason = "" if encoder else f"; {ENCODER} is not in the hub's cache, and the hub is unreachable"
        presets = ["squad", "large"] if size >= LARGE else ["squad"]
        project.lines.append(f"encoder: from scratch (presets: {', '.join(presets)}){reason}")
        return presets
    path, name, note = Path(chosen), chosen.removeprefix(hub.HUB), ""
    if chosen != ENCODER:
        project.put("retriever.init", path_in_params(project, path) if path.is_dir() else chosen)
    if not hub.is_sentence_encoder(path) if path.is_dir() else name.startswith(("google-bert/", "bert-")):
        project.put("retriever.pooling", "mean")  # [CLS] of a BERT without such training retrieves little
        note = "; retriever.pooling: mean, because it is not a sentence encoder"
    presets = ["squad", "minilm", *(["base"] if is_wide(chosen) else [])]
    project.lines.append(f"encoder: {chosen} (presets: {', '.join(presets)}){note}")
    return presets


def choose_reader(project: Project, reader: str | None, *, has_questions: bool) -> None:
    """Set reader.init to the given reader, or to one that the hub offers; without one, the project only searches."""
    language = project.options.snapshot.language
    proposed = READERS if language == ENGLISH else MULTILINGUAL_READERS
    is_folder = reader is not None and Path(reader).is_dir()
    names = proposed if reader is None else () if is_folder or reader == NO_READER else (reader,)
    offers = [(name, about) for name in names if (about := hub.describe_model(name)) is not None]
    chosen = reader or (offers[0][0] if offers else proposed[0] if hub.is_cached(proposed[0]) else None)
    note = f"{offers[0][1]}, loaded by the first run" if offers else str(chosen)
    if reader is None:
        note += "".join(f"; better and larger: --reader {about}" for _, about in offers[1:])
        note += "; --no-reader for search alone"
    if chosen is None and has_questions:
        project.put("tag.method", "phrases")
        project.lines.append("reader: trained on your questions from the encoder, as no published one can be loaded")
        return
    if chosen is None or chosen == NO_READER:
        if has_questions:
            project.presets.append("reader")
            project.put("reader.init", NO_READER)
        reason = "no reader, by --no-reader" if chosen else "no reader can be loaded: give one with --reader"
        project.lines.insert(0, f"search, not answers: {reason}")
        return
    project.put("reader.init", path_in_params(project, Path(chosen)) if is_folder else chosen)
    project.presets.append("reader")
    if has_questions:
        note += ", which 'realmops adapt' trains further on your questions"
    project.lines.append(f"reader: {note}")


def is_wide(encoder: str) -> bool:
    if not Path(encoder).is_dir():
        return any(size in encoder.lower() for size in ("base", "large"))
    shape = hub.read_optional_json(Path(encoder) / hub.CONFIG)
    widths = (shape.get(name) for name in ("hidden_size", "dim"))
    return any(isinstance(width, int) and width >= WIDE for width in widths)
