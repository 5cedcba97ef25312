"""params.yaml as frozen dataclasses: typed, strict, without defaults in code."""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

LARGEST_FILE = 1 << 20
CLOSED_BOOK = ("t5",)  # of finetune.reader: those that read no passages


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes; a field without a range takes those above 0."""

    least: int | None = None  # None: more than 0
    most: float = math.inf


Count = Annotated[int, Range(least=0)]
Amount = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
Part = Annotated[float, Range(most=1)]  # a share that is not 0


@dataclass(frozen=True)
class RunOptions:
    """Options of every stage."""

    seed: Count
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16"]
    threads: int


@dataclass(frozen=True)
class BertOptions:
    """Where the encoders start."""

    init: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    dropout: Share


@dataclass(frozen=True)
class Sample:
    """The sample corpus."""

    seed: Count
    subjects: int
    warmup_worlds: int
    test_share: Part
    dev_share: Part


@dataclass(frozen=True)
class SnapshotOptions:
    """From documents to passages."""

    documents: str
    format: str
    warmup: str
    use_warmup: bool
    block_wordpieces: int
    whole_documents: bool
    wikipedia_titles: bool
    broken_share: Share
    workers: int


@dataclass(frozen=True)
class QuestionFiles:
    """Question files of the three splits."""

    train: str
    dev: str
    test: str
    format: Literal["auto", "jsonl", "webquestions", "curatedtrec", "squad", "dpr"]


@dataclass(frozen=True)
class Tag:
    """Salient spans."""

    method: Literal["tagger", "given", "dates"]
    train: str
    dev: str
    dates: bool
    steps: Count
    batch_size: int
    learning_rate: float
    hidden: Share
    wordpieces: int


@dataclass(frozen=True)
class RetrieverOptions:
    """The two embedders (section 3.2)."""

    tower: Literal["bert", "bag"]
    pooling: Literal["auto", "cls", "mean"]
    projection: Literal["orthogonal", "identity", "pca", "random"]
    embedding_width: Count
    head: Literal["paper", "release", "normalised", "cosine"]
    temperature: float
    segments: Literal["auto", "one", "two"]
    document_vectors: int
    share_embedders: bool
    hybrid: bool


@dataclass(frozen=True)
class ReaderOptions:
    """The knowledge-augmented encoder (section 3.2)."""

    copies: bool
    apart: bool
    matches: bool


@dataclass(frozen=True)
class IndexOptions:
    """How passages are searched."""

    type: Literal["auto", "exact", "ivf", "hnsw", "pq"]
    target_recall: Part


@dataclass(frozen=True)
class Ict:
    """Inverse cloze task, and the reader's warm start."""

    task: Literal["cloze", "crop"]
    crops: int
    steps: Count
    batch_size: int
    learning_rate: float
    query_wordpieces: int
    removal: Share
    neighbours: int
    reader_steps: Count
    reader_batch_size: int
    reader_learning_rate: float
    reader_wordpieces: int
    reader_random_masks: Share
    checkpoint_every: int


@dataclass(frozen=True)
class Pretrain:
    """REALM pre-training and its exchange with the index builder."""

    steps: Count
    batch_size: int
    candidates: int
    retriever_learning_rate: float
    reader_learning_rate: float
    retriever_delay: Count
    query_wordpieces: int
    reader_wordpieces: int
    examples: Literal["corpus", "warmup"]
    masking: Literal["salient", "recurring", "random_token", "random_span", "matched_span"]
    max_masks: int
    marginal: Literal["joint", "per_token"]
    null_document: bool
    exclude_trivial: bool
    crop_weight: Amount
    refresh_every: int
    lag: Count
    adopt: Literal["fixed_lag", "as_soon_as_ready"]
    query_encoder: Literal["snapshot", "fresh"]
    max_staleness_steps: int
    on_stale: Literal["wait", "warn", "continue"]
    builder: Literal["child", "external"]
    builder_timeout: float
    exchange: str
    shard_rows: int
    staleness_queries: Count
    collapse_share: Share
    masked_sentences: Count
    gradient_checkpointing: bool

    @property
    def documents(self) -> int:
        """Passages among the candidates of an example, the null document left out."""
        return self.candidates - int(self.null_document)


@dataclass(frozen=True)
class Finetune:
    """Open-QA fine-tuning."""

    retriever: Literal["pretrain", "ict", "bm25", "tfidf", "graph", "path"]
    reader: Literal["pretrain", "ict", "t5"]
    span_loss: Literal["marginal", "hard_em", "per_passage"]
    retriever_training: Literal["queries", "passages"]
    retriever_epochs: Amount
    retriever_batch_size: int
    retriever_refresh_every: Count
    reader_training: Literal["passages", "windows"]
    epochs: Amount
    batch_size: int
    retriever_learning_rate: float
    reader_learning_rate: float
    span_learning_rate: float
    reader_dropout: Share
    freeze_words: bool
    retriever_candidates: int
    reader_candidates: int
    query_wordpieces: int
    reader_wordpieces: int
    answer_wordpieces: int
    decoding: Literal["best_span", "minimum_risk"]
    span_width: int
    wanted_precision: Share
    checkpoint_every: int

    @property
    def reads_passages(self) -> bool:
        """Whether the reader answers from passages, and not from its weights alone."""
        return self.reader not in CLOSED_BOOK


@dataclass(frozen=True)
class ClosedBookOptions:
    """A T5 that answers without reading (``finetune.reader: t5``)."""

    init: str
    steps: Count
    batch_size: int
    learning_rate: float
    epochs: Amount
    passage_wordpieces: Annotated[int, Range(least=8)]
    question_wordpieces: Annotated[int, Range(least=2)]
    answer_wordpieces: Annotated[int, Range(least=2)]
    checkpoint_every: int


@dataclass(frozen=True)
class Optimiser:
    """BERT's AdamW."""

    weight_decay: Amount
    clip: float
    bias_correction: bool
    ramp_share: Share
    ramp_min: Count


@dataclass(frozen=True)
class Evaluate:
    """Evaluation."""

    bootstrap: Count
    bm25: bool


@dataclass(frozen=True)
class Tracking:
    """MLflow."""

    enabled: bool
    experiment: str


SECTIONS: dict[str, type] = {
    "run": RunOptions,
    "bert": BertOptions,
    "sample": Sample,
    "snapshot": SnapshotOptions,
    "questions": QuestionFiles,
    "tag": Tag,
    "retriever": RetrieverOptions,
    "reader": ReaderOptions,
    "index": IndexOptions,
    "ict": Ict,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "closed_book": ClosedBookOptions,
    "optimiser": Optimiser,
    "evaluate": Evaluate,
    "tracking": Tracking,
}
"""All sections of params.yaml, in its order."""


class _Loader(yaml.SafeLoader):
    """YAML without aliases and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ValueError(f"line {mark.line + 1}: an alias (*name) is not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise ValueError(f"line {key_node.start_mark.line + 1}: a key must be a word, not a list or a mapping")
            if key in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Sections of a params file or preset; ValueError names the file and line of what is wrong."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run in the project's folder or name the file with --params")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a params file has at most {LARGEST_FILE}")
    try:
        values = yaml.load(path.read_bytes(), _Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise ValueError(f"{path}: sections with keys are wanted, as in 'run:' and below it '  seed: 0'")
    return values


def merge(
    base: Mapping[str, Mapping[str, Any]], difference: Mapping[str, Mapping[str, Any]], source: str
) -> dict[str, dict[str, Any]]:
    """``base`` with the values of ``difference``; a key that ``base`` lacks is an error that names ``source``."""
    merged = {section: dict(keys) for section, keys in base.items()}
    for section, keys in difference.items():
        if section not in merged:
            raise ValueError(f"{source}: there is no section {section!r}; sections are {', '.join(merged)}")
        for key, value in keys.items():
            if key not in merged[section]:
                raise ValueError(
                    f"{source}: there is no key {section}.{key}; its keys are {', '.join(merged[section])}"
                )
            merged[section][key] = value
    return merged


def parse_setting(text: str) -> dict[str, dict[str, Any]]:
    """``section.key=value`` of the command line, the value read as YAML."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"--set {text!r}: section.key=value is wanted, for example pretrain.steps=100")
    try:
        return {section: {key: yaml.load(value, _Loader)}}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--set {text!r}: {' '.join(str(error).split())}") from None


def load(path: Path, *, presets: Iterable[Path] = (), settings: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The sections of a params file with presets and then settings laid over it, all checked."""
    values = checked(read_yaml(path), str(path))
    differences = [(str(preset), read_yaml(preset)) for preset in presets]
    differences += [(f"--set {setting}", parse_setting(setting)) for setting in settings]
    for source, difference in differences:
        values = merge(values, difference, source)
        values |= {name: asdict(parse_section(name, values[name], source)) for name in difference}
    check_together(values)
    return values


def checked(values: dict[str, dict[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """All sections of ``source``, 1e-5 a number however it was written; ValueError names what is unknown or wrong."""
    check_names(values, source)
    return {name: asdict(parse_section(name, values[name], source)) for name in SECTIONS}


def rewritten(path: Path, values: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The text of a params file with other values in it, comments kept, and each change as ``key: old -> new``."""
    from ruamel.yaml import YAML

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 16
    document = editor.load(path.read_text(encoding="utf-8"))
    changes = []
    for section, keys in read_yaml(path).items():
        old, new = (asdict(parse_section(section, options)) for options in (keys, values[section]))
        for key in (key for key in new if new[key] != old[key]):
            changes.append(f"{section}.{key}: {old[key]} -> {new[key]}")
            document[section][key] = new[key]
    text = StringIO()
    editor.dump(document, text)
    return text.getvalue(), changes


def check_together(values: Mapping[str, Mapping[str, Any]]) -> None:
    """What one section demands of another; ValueError names both keys."""
    positions = values["bert"]["positions"]
    lengths = ["snapshot.block_wordpieces", "tag.wordpieces", "ict.query_wordpieces", "pretrain.query_wordpieces"]
    lengths += [f"{stage}.reader_wordpieces" for stage in ("ict", "pretrain", "finetune")]
    for name in lengths:
        section, key = name.split(".")
        if values[section][key] > positions:
            raise ValueError(
                f"{name} is {values[section][key]}, but the encoder has bert.positions={positions}; "
                "lower the one or raise the other"
            )
    if values["reader"]["apart"] and not values["reader"]["copies"]:
        raise ValueError(
            "reader.apart is true and reader.copies false: what is read apart is joined by the copy head alone; set "
            "reader.copies=true, or reader.apart=false"
        )
    question, together = values["finetune"]["query_wordpieces"], values["finetune"]["reader_wordpieces"]
    if together <= question + 1:
        raise ValueError(
            f"finetune.reader_wordpieces is {together}: no room for a passage beside a question of "
            f"finetune.query_wordpieces={question}; raise the first"
        )
    _check_towers(values)


def _check_towers(values: Mapping[str, Mapping[str, Any]]) -> None:
    """What the options of the retriever demand of each other, as far as it is seen without the encoder."""
    options, bert = values["retriever"], values["bert"]
    head, width = options["head"], options["embedding_width"]
    if options["tower"] == "bag":
        if head != "cosine":
            raise ValueError(
                f"retriever.tower is bag and retriever.head {head}: the vectors of a bag are divided by their length; "
                "set retriever.head=cosine"
            )
        if not width:
            raise ValueError(
                "retriever.tower is bag and retriever.embedding_width 0: there is no encoder whose width could be "
                "taken; set retriever.embedding_width=384"
            )
        if options["document_vectors"] > 1:
            raise ValueError(
                f"retriever.tower is bag and retriever.document_vectors {options['document_vectors']}: a bag makes one "
                "vector of a passage; set retriever.document_vectors=1, or retriever.tower=bert"
            )
        return
    check_vectors(options["document_vectors"], options["pooling"], options["pooling"])
    if head == "release" and (options["pooling"] == "mean" or options["projection"] in ("identity", "pca")):
        raise ValueError(
            f"retriever.head is release, with retriever.pooling {options['pooling']} and retriever.projection "
            f"{options['projection']}: the released code has a dense layer behind BERT's pooler, which reads [CLS]; "
            "set retriever.pooling=cls and retriever.projection=orthogonal, or another retriever.head"
        )
    if bert["init"] == "small":
        check_width(options["projection"], width, bert["width"])


def check_width(projection: str, width: int, encoder_width: int) -> None:
    """ValueError when this projection makes no embeddings of this width from vectors of the encoder."""
    if projection == "identity" and width not in (0, encoder_width):
        raise ValueError(
            f"retriever.projection is identity, which keeps the encoder's width of {encoder_width}, and "
            f"retriever.embedding_width is {width}; set retriever.embedding_width=0, or another retriever.projection"
        )
    if projection == "pca" and width > encoder_width:
        raise ValueError(
            f"retriever.projection is pca, and retriever.embedding_width is {width}: the encoder's vectors have no "
            f"more than {encoder_width} components; set retriever.embedding_width={encoder_width} or less"
        )


def check_vectors(vectors: int, pooling: str, means: str) -> None:
    """ValueError when a pooling, which ``means`` this one where it is ``auto``, makes fewer vectors of a passage."""
    if vectors > 1 and means == "cls":
        raise ValueError(
            f"retriever.document_vectors is {vectors}, and retriever.pooling {pooling} makes one vector, that of "
            "[CLS]; set retriever.pooling=mean, or retriever.document_vectors=1"
        )


def notes(stages: Collection[str], values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is allowed and seldom meant, in words, where one of these stages would do it."""
    block, question = values["snapshot"]["block_wordpieces"], values["finetune"]["query_wordpieces"]
    found = []
    for name, beside in (("pretrain", 0), ("finetune", question)):
        limit = values[name]["reader_wordpieces"]
        if name in stages and limit < block:
            found.append(
                f"passages have up to snapshot.block_wordpieces={block} wordpieces, and the reader sees no more than "
                f"{name}.reader_wordpieces={limit} of one and the text beside it: raise that to {block + beside}, or "
                "the ends of long passages are not read"
            )
    return found


def check_names(values: Mapping[str, Any], source: str) -> None:
    """Every section must be there, and no other."""
    for name in values:
        if name not in SECTIONS:
            raise ValueError(f"{source}: unknown section {name!r}; sections are {', '.join(SECTIONS)}")
    for name in SECTIONS:
        if name not in values:
            raise ValueError(f"{source}: the section {name!r} is missing; take it from the project's params.yaml")


def parse_section(name: str, values: Mapping[str, Any], source: str = "params") -> Any:
    """One section as its dataclass; ValueError names a key that is unknown, missing, of a wrong type or range."""
    section = SECTIONS[name]
    hints = typing.get_type_hints(section, include_extras=True)
    for key in values:
        if key not in hints:
            raise ValueError(f"{source}: unknown key {name}.{key}; its keys are {', '.join(hints)}")
    for key in hints:
        if key not in values:
            raise ValueError(f"{source}: the key {name}.{key} is missing; take it from the project's params.yaml")
    return section(**{key: _checked(values[key], hint, f"{source}: {name}.{key}") for key, hint in hints.items()})


def _checked(value: Any, hint: Any, where: str) -> Any:
    bounds = Range()
    if typing.get_origin(hint) is Annotated:
        hint, bounds = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(map(str, allowed))}")
        return value
    if hint is float and isinstance(value, str):  # YAML reads 1e-5 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {value!r} ({type(value).__name__}); {_KIND[hint]} is wanted")
    if hint in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; a finite number is wanted")
        if value < bounds.least if bounds.least is not None else value <= 0:
            least = "more than 0" if bounds.least is None else f"at least {bounds.least}"
            raise ValueError(f"{where} is {value}; it must be {least}")
        if value > bounds.most:
            raise ValueError(f"{where} is {value}; it must be at most {bounds.most}")
    return value


_KIND = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def preset_path(name: str, params: Path) -> Path:
    """The file of a preset: a path, or a name under pipelines/presets beside the params file."""
    folder = params.parent / "pipelines" / "presets"
    for candidate in (Path(name), folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))
    raise ValueError(
        f"--preset {name!r}: no such file, and none of the presets {', '.join(known) or '(none)'} under {folder}"
    )
