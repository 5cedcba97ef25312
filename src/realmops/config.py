"""Options as pydantic models, one per section; defaults.yaml holds the defaults, params.yaml the overrides."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from realmops.config_rules import check_rules, option_rules
from realmops.config_yaml import locate_key, parse_yaml, read_params, read_yaml

PACKAGE = Path(__file__).parent
DEFAULTS = PACKAGE / "defaults.yaml"
LARGEST_INTEGER = 2**63 - 1  # maximum of int64 arrays
CLOSED_BOOK = ("t5",)  # values of finetune.reader whose models read no passages

Values = Mapping[str, Mapping[str, Any]]  # options by section


def _parse_quoted_number(value: Any) -> Any:
    """Return a quoted number as float: YAML 1.1 writers put quotation marks around 1e-05."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


Size = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Number = Annotated[float, BeforeValidator(_parse_quoted_number)]
Amount = Annotated[Number, Field(ge=0)]
PositiveAmount = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]

_RENAMED = {("bert", "init"): "retriever.init"}  # keys of earlier versions
SECTIONS: dict[str, type["Section"]] = {}  # in the order of defaults.yaml


class Section(BaseModel):
    """Options of one section, documented in defaults.yaml and built by ``parse_section``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    section: ClassVar[str]  # name in YAML

    def __init_subclass__(cls, name: str) -> None:
        cls.section = name
        SECTIONS[name] = cls


class RunOptions(Section, name="run"):
    """Seed, device, dtype and threads of a run."""

    seed: Count
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16"]
    threads: Size | Literal["auto"]


class BertOptions(Section, name="bert"):
    """Shape of a new encoder; positions and dropout of any encoder."""

    vocabulary: Size
    width: Size
    layers: Size
    heads: Size
    intermediate: Size
    positions: Size
    dropout: Share


class Sample(Section, name="sample"):
    """Size and splits of the generated sample corpus."""

    seed: Count
    subjects: Annotated[int, Field(ge=60, le=800)]
    warmup_worlds: Size
    test_share: PositiveShare
    dev_share: PositiveShare


class SnapshotOptions(Section, name="snapshot"):
    """Documents, and how they are split into passages."""

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
    """Question files of the three splits and their format."""

    train: str
    dev: str
    test: str
    format: Literal["auto", "jsonl", "json", "curatedtrec", "dpr", "csv"]


class Tag(Section, name="tag"):
    """Salient span tagging, and the training of the tagger."""

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
    """Encoder and architecture of the retriever: tower, pooling, projection, head."""

    init: str
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
    """Architecture and initialisation of the reader."""

    init: str
    copies: bool
    apart: bool
    matches: bool


class IndexOptions(Section, name="index"):
    """Index type and the recall that it must reach."""

    type: Literal["auto", "exact", "ivf", "hnsw", "pq"]
    target_recall: PositiveShare


class Ict(Section, name="ict"):
    """Warm start of the retriever (inverse cloze task) and the reader (masked words)."""

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
    """REALM pre-training, index refresh and staleness."""

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
        """Number of candidate passages per example, without the null document."""
        return self.candidates - int(self.null_document)


class Finetune(Section, name="finetune"):
    """Fine-tuning of retriever and reader on questions."""

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
        """Whether the reader answers from retrieved passages rather than from its weights alone."""
        return self.reader not in CLOSED_BOOK


class ClosedBookOptions(Section, name="closed_book"):
    """The closed-book T5 baseline."""

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
    """Adam and the learning rate schedule."""

    weight_decay: Amount
    clip: PositiveAmount
    bias_correction: bool
    ramp_share: Share
    ramp_min: Count


class Evaluate(Section, name="evaluate"):
    """Bootstrap intervals and baselines of the evaluation."""

    bootstrap: Count
    bm25: bool


class Inputs(Section, name="inputs"):
    """Store of uploaded inputs."""

    store: str


class Tracking(Section, name="tracking"):
    """MLflow tracking."""

    enabled: bool
    experiment: str


@cache
def default_options() -> Values:
    """Return all sections with their values in defaults.yaml."""
    values = read_yaml(DEFAULTS)
    return {name: parse_section(name, values[name], DEFAULTS).model_dump() for name in SECTIONS}


def parse_section(name: str, values: Mapping[str, Any], source: str | Path = "params") -> Any:
    """Return one section as a validated model.

    Raises:
        ValueError: if a key is unknown or missing, or a value has the wrong type or range.
    """
    try:
        return SECTIONS[name].model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise ValueError(_first_error(error, name, source)) from None


def _first_error(error: ValidationError, section: str, source: str | Path) -> str:
    """Return the message for the first validation error of a section; unknown keys precede other errors."""
    first = min(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    key, value = str(first["loc"][0]), first["input"]
    place = locate_key(source, section, key)
    if new_key := _RENAMED.get((section, key)):
        return f"{place}: unknown key {section}.{key}, which was renamed; set {new_key} instead"
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {section}.{key}; allowed keys are {_allowed(key, SECTIONS[section].model_fields)}"
    if first["type"] == "missing":
        return f"{place}: the key {section}.{key} is missing; docs/options.md has its default"
    expected = first["msg"].removeprefix("Input should be ")
    return f"{place}: {section}.{key} is {value!r} ({type(value).__name__}); it must be {expected}"


def _allowed(name: object, names: Collection[str]) -> str:
    """Return all allowed names, and the closest match to ``name`` if there is one."""
    matches = difflib.get_close_matches(str(name), names, 1)
    return ", ".join(names) + (f"; closest match: {matches[0]}" if matches else "")


def parse_setting(text: str) -> dict[str, dict[str, Any]]:
    """Parse ``section.key=value`` of the command line, with the value as YAML."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"--set {text!r} is not of the form section.key=value; for example pretrain.steps=100")
    return {section: {key: parse_yaml(value, f"--set {text!r}")}}


def load_params(path: Path, *, presets: Iterable[Path] = (), settings: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Load and validate all sections of a params file.

    Later sources override earlier ones: defaults.yaml, the presets named in the file, the file itself, ``presets``,
    ``settings``.
    """
    preset_names, overrides = read_params(path)
    values = merge_options(
        overrides, path, apply_presets(default_options(), [preset_path(name, path) for name in preset_names])
    )
    values = apply_settings(apply_presets(values, presets), settings)
    check_rules(option_rules(values))
    return values


def apply_presets(values: Values, presets: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return ``values`` overridden by preset files in order, and validated."""
    merged = {section: dict(keys) for section, keys in values.items()}
    for preset in presets:
        merged = merge_options(read_yaml(preset), preset, merged)
    return merged


def apply_settings(values: dict[str, dict[str, Any]], settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return ``values`` overridden by ``--set`` settings in order, and validated."""
    for setting in settings:
        values = merge_options(parse_setting(setting), f"--set {setting}", values)
    return values


def merge_options(values: Values, source: str | Path, base: Values | None = None) -> dict[str, dict[str, Any]]:
    """Return ``base`` (the defaults if None) overridden by ``values`` and validated.

    ``source`` is the file or a description of ``values``, for error messages.

    Raises:
        ValueError: if a section or key is unknown, or a value is invalid.
    """
    merged = {section: dict(keys) for section, keys in (default_options() if base is None else base).items()}
    for section, keys in values.items():
        if section not in merged:
            allowed = _allowed(section, merged)
            raise ValueError(f"{locate_key(source, section)}: unknown section {section!r}; sections are {allowed}")
        merged[section] = parse_section(section, merged[section] | dict(keys), source).model_dump()
    return merged


_ADDED = {("snapshot", "language"): "en"}  # options added later, with the value equivalent to their absence
_PLACEMENT = {("pretrain", "builder"), ("pretrain", "exchange")}  # where indexes are built; set by a cluster


def cache_key_options(values: Values) -> dict[str, dict[str, Any]]:
    """Return the options that are part of cache keys.

    Options that only choose where indexes are built are left out. An option added in a later version is left out at the
    value that keeps the earlier behaviour, so that existing keys remain valid.
    """
    return {
        section: {
            key: value
            for key, value in keys.items()
            if (section, key) not in _PLACEMENT and _ADDED.get((section, key), ...) != value
        }
        for section, keys in values.items()
    }


def preset_path(name: str, params: Path) -> Path:
    """Return the file of a preset, given its path or its name.

    A name is looked up in the folder ``presets`` next to the params file, then in the package.
    """
    folders = params.parent / "presets", PACKAGE / "presets"
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    names = {p.relative_to(folder).with_suffix("").as_posix() for folder in folders for p in folder.rglob("*.yaml")}
    raise ValueError(
        f"unknown preset {name!r}: neither a file nor one of the presets {', '.join(sorted(names))} of realmops and "
        f"{folders[0]}"
    )
