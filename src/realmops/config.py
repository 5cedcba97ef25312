"""Options as pydantic models, one for each section; defaults.yaml has the defaults, a params.yaml what differs."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from realmops.config_rules import check, option_rules
from realmops.config_yaml import parse_yaml, place_of, read_params, read_yaml

PACKAGE = Path(__file__).parent
DEFAULTS = PACKAGE / "defaults.yaml"
LARGEST_INTEGER = 2**63 - 1  # what an array of 64 bits holds
CLOSED_BOOK = ("t5",)  # of finetune.reader: those that read no passages

Values = Mapping[str, Mapping[str, Any]]  # options by section


def _number_in_quotes(value: Any) -> Any:
    """Return a text as the number that it is: writers of YAML 1.1 put quotation marks around 1e-05."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


Size = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Number = Annotated[float, BeforeValidator(_number_in_quotes)]
Amount = Annotated[Number, Field(ge=0)]
PositiveAmount = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]

SECTIONS: dict[str, type["Section"]] = {}  # all sections of defaults.yaml, in its order


class Section(BaseModel):
    """The options of one section; defaults.yaml says what each does. ``parse_section`` makes one from values."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    section: ClassVar[str]  # its name

    def __init_subclass__(cls, name: str) -> None:
        cls.section = name
        SECTIONS[name] = cls


class RunOptions(Section, name="run"):
    seed: Count
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "int8"]
    threads: Size


class BertOptions(Section, name="bert"):
    init: str
    vocabulary: Size
    width: Size
    layers: Size
    heads: Size
    intermediate: Size
    positions: Size
    dropout: Share


class Sample(Section, name="sample"):
    seed: Count
    subjects: Annotated[int, Field(ge=60, le=800)]
    warmup_worlds: Size
    test_share: PositiveShare
    dev_share: PositiveShare


class SnapshotOptions(Section, name="snapshot"):
    documents: str
    format: str
    warmup: str
    use_warmup: bool
    block_wordpieces: Size
    language: str
    whole_documents: bool
    wikipedia_titles: bool
    broken_share: Share
    workers: Size


class QuestionFiles(Section, name="questions"):
    train: str
    dev: str
    test: str
    format: Literal["auto", "jsonl", "webquestions", "curatedtrec", "squad", "dpr", "csv"]


class Tag(Section, name="tag"):
    method: Literal["tagger", "phrases", "given", "dates"]
    train: str
    dev: str
    dates: bool
    steps: Count
    batch_size: Size
    learning_rate: PositiveAmount
    hidden: Share
    wordpieces: Size


class RetrieverOptions(Section, name="retriever"):
    tower: Literal["bert", "bag"]
    pooling: Literal["auto", "cls", "mean", "last"]
    projection: Literal["orthogonal", "identity", "pca", "random", "first"]
    embedding_width: Count
    head: Literal["paper", "release", "normalised", "cosine"]
    temperature: PositiveAmount
    segments: Literal["auto", "one", "two"]
    document_vectors: Size
    share_embedders: bool
    hybrid: bool


class ReaderOptions(Section, name="reader"):
    init: str
    copies: bool
    apart: bool
    matches: bool


class IndexOptions(Section, name="index"):
    type: Literal["auto", "exact", "ivf", "hnsw", "pq"]
    target_recall: PositiveShare


class Ict(Section, name="ict"):
    task: Literal["cloze", "crop"]
    crops: Size
    steps: Count
    batch_size: Size
    learning_rate: PositiveAmount
    query_wordpieces: Size
    removal: Share
    neighbours: Size
    epochs: Amount
    reader_steps: Count
    reader_batch_size: Size
    reader_learning_rate: PositiveAmount
    reader_wordpieces: Size
    reader_random_masks: Share
    gradient_checkpointing: bool
    checkpoint_every: Size


class Pretrain(Section, name="pretrain"):
    steps: Count
    batch_size: Size
    candidates: Size
    retriever_learning_rate: PositiveAmount
    reader_learning_rate: PositiveAmount
    retriever_delay: Count
    query_wordpieces: Size
    reader_wordpieces: Size
    examples: Literal["corpus", "warmup"]
    masking: Literal["salient", "recurring", "random_token", "random_span", "matched_span"]
    max_masks: Size
    marginal: Literal["joint", "per_token"]
    null_document: bool
    exclude_trivial: bool
    crop_weight: Amount
    refresh_every: Size
    lag: Count
    adopt: Literal["fixed_lag", "as_soon_as_ready"]
    query_encoder: Literal["snapshot", "fresh"]
    max_staleness_steps: Size
    on_stale: Literal["wait", "warn", "continue"]
    builder: Literal["child", "external"]
    builder_timeout: PositiveAmount
    exchange: str
    shard_rows: Size
    staleness_queries: Count
    collapse_share: Share
    masked_sentences: Count
    gradient_checkpointing: bool

    @property
    def documents(self) -> int:
        """Passages among the candidates of an example, the null document left out."""
        return self.candidates - int(self.null_document)


class Finetune(Section, name="finetune"):
    retriever: Literal["pretrain", "ict", "bm25", "tfidf", "graph", "path"]
    reader: Literal["pretrain", "ict", "t5"]
    span_loss: Literal["marginal", "hard_em", "per_passage"]
    retriever_training: Literal["queries", "passages"]
    retriever_epochs: Amount
    retriever_batch_size: Size
    retriever_refresh_every: Count
    reader_training: Literal["passages", "windows"]
    epochs: Amount
    batch_size: Size
    retriever_learning_rate: PositiveAmount
    reader_learning_rate: PositiveAmount
    span_learning_rate: PositiveAmount
    reader_dropout: Share
    freeze_words: bool
    retriever_candidates: Size
    reader_candidates: Size
    query_wordpieces: Size
    reader_wordpieces: Size
    answer_wordpieces: Size
    decoding: Literal["best_span", "minimum_risk"]
    span_width: Size
    wanted_precision: Share
    checkpoint_every: Size

    @property
    def reads_passages(self) -> bool:
        """Whether the reader answers from passages, and not from its weights alone."""
        return self.reader not in CLOSED_BOOK


class ClosedBookOptions(Section, name="closed_book"):
    init: str
    steps: Count
    batch_size: Size
    learning_rate: PositiveAmount
    epochs: Amount
    passage_wordpieces: Annotated[Size, Field(ge=8)]
    question_wordpieces: Annotated[Size, Field(ge=2)]
    answer_wordpieces: Annotated[Size, Field(ge=2)]
    checkpoint_every: Size


class Optimiser(Section, name="optimiser"):
    weight_decay: Amount
    clip: PositiveAmount
    bias_correction: bool
    ramp_share: Share
    ramp_min: Count


class Evaluate(Section, name="evaluate"):
    bootstrap: Count
    bm25: bool


class Tracking(Section, name="tracking"):
    enabled: bool
    experiment: str


@cache
def defaults() -> Values:
    """Return all sections with the values of defaults.yaml."""
    values = read_yaml(DEFAULTS)
    return {name: parse_section(name, values[name], DEFAULTS).model_dump() for name in SECTIONS}


def parse_section(name: str, values: Mapping[str, Any], source: str | Path = "params") -> Any:
    """Return one section as its model; ValueError names a key that is unknown, missing, of a wrong type or range."""
    try:
        return SECTIONS[name].model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise ValueError(_first_error(error, name, source)) from None


def _first_error(error: ValidationError, section: str, source: str | Path) -> str:
    """Return the message for what pydantic found in a section: unknown keys first, else in the order of the options."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    key, value = str(first["loc"][0]), first["input"]
    place = place_of(source, section, key)
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {section}.{key}; its keys are {_allowed(key, SECTIONS[section].model_fields)}"
    if first["type"] == "missing":
        return f"{place}: the key {section}.{key} is missing; docs/options.md has its default"
    expected = first["msg"].removeprefix("Input should be ")
    return f"{place}: {section}.{key} is {value!r} ({type(value).__name__}); it must be {expected}"


def _allowed(name: object, names: Collection[str]) -> str:
    """Return all names, and the one that was meant, if one is near."""
    near = difflib.get_close_matches(str(name), names, 1)
    return ", ".join(names) + (f"; is {near[0]} meant?" if near else "")


def parse_setting(text: str) -> dict[str, dict[str, Any]]:
    """Return ``section.key=value`` of the command line as options, the value read as YAML."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"--set {text!r} is no section.key=value, for example pretrain.steps=100")
    return {section: {key: parse_yaml(value, f"--set {text!r}")}}


def load(path: Path, *, presets: Iterable[Path] = (), settings: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return all sections, checked, laid over each other: the defaults, the presets that a params file names, the file
    itself, then ``presets`` and ``settings``.
    """
    named, own = read_params(path)
    values = checked(own, path, laid(defaults(), [preset_path(name, path) for name in named]))
    values = apply_settings(laid(values, presets), settings)
    check(option_rules(values))
    return values


def laid(values: Values, presets: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return ``values`` with those of preset files laid over them, in order, all checked."""
    laid = {section: dict(keys) for section, keys in values.items()}
    for preset in presets:
        laid = checked(read_yaml(preset), preset, laid)
    return laid


def apply_settings(values: dict[str, dict[str, Any]], settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return ``values`` with those of --set laid over them, in order, all checked."""
    for setting in settings:
        values = checked(parse_setting(setting), f"--set {setting}", values)
    return values


def checked(values: Values, source: str | Path, base: Values | None = None) -> dict[str, dict[str, Any]]:
    """Return ``values`` laid over ``base`` or else the defaults; ValueError names what is unknown or wrong."""
    laid = {section: dict(keys) for section, keys in (defaults() if base is None else base).items()}
    for section, keys in values.items():
        if section not in laid:
            known = _allowed(section, laid)
            raise ValueError(f"{place_of(source, section)}: unknown section {section!r}; sections are {known}")
        laid[section] = parse_section(section, laid[section] | dict(keys), source).model_dump()
    return laid


_LATER = {("snapshot", "language"): "en"}  # options that came later, with the value that acts as versions before did
_PLACES = {("pretrain", "builder"), ("pretrain", "exchange")}  # where indexes are built; a cluster sets them itself


def keyed(values: Values) -> dict[str, dict[str, Any]]:
    """Return the options that make a key: not those that say where indexes are built.

    Later ones count only where they act otherwise, so that keys stay as they were.
    """
    return {
        section: {
            key: value
            for key, value in keys.items()
            if (section, key) not in _PLACES and _LATER.get((section, key), ...) != value
        }
        for section, keys in values.items()
    }


def preset_path(name: str, params: Path) -> Path:
    """Return the file of a preset: a path, or a name under ``presets`` beside the params file, else in the package."""
    folders = params.parent / "presets", PACKAGE / "presets"
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    known = {p.relative_to(folder).with_suffix("").as_posix() for folder in folders for p in folder.rglob("*.yaml")}
    raise ValueError(
        f"preset {name!r}: no such file, and none of the presets {', '.join(sorted(known))}, which are realmops' own "
        f"and those in {folders[0]}"
    )
