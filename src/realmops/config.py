"""Options as frozen dataclasses: typed and strict; defaults.yaml has the defaults, a params.yaml what differs."""

import contextlib
import difflib
import math
import re
import typing
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform

import yaml

PACKAGE = Path(__file__).parent
DEFAULTS = PACKAGE / "defaults.yaml"
LARGEST_FILE = 1 << 20
CLOSED_BOOK = ("t5",)  # of finetune.reader: those that read no passages
ENCODER = "encoder"  # reader.init: the reader starts as the encoder


Values = Mapping[str, Mapping[str, Any]]  # options by section

# A number with its least (None: more than 0) and its largest value. One that is not annotated is more than 0.
Count = Annotated[int, 0, math.inf]
Amount = Annotated[float, 0, math.inf]
Share = Annotated[float, 0, 1]
Part = Annotated[float, None, 1]  # a share that is not 0

SECTIONS: dict[str, type] = {}  # all sections of defaults.yaml, in its order


@dataclass_transform(frozen_default=True)
class Section:
    """What becomes a frozen dataclass with the options of the section ``name``; defaults.yaml says what each does."""

    def __init_subclass__(cls, name: str) -> None:
        SECTIONS[name] = dataclass(frozen=True)(cls)


class RunOptions(Section, name="run"):
    seed: Count
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "int8"]
    threads: int


class BertOptions(Section, name="bert"):
    init: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    dropout: Share


class Sample(Section, name="sample"):
    seed: Count
    subjects: Annotated[int, 60, 800]
    warmup_worlds: int
    test_share: Part
    dev_share: Part


class SnapshotOptions(Section, name="snapshot"):
    documents: str
    format: str
    warmup: str
    use_warmup: bool
    block_wordpieces: int
    language: str
    whole_documents: bool
    wikipedia_titles: bool
    broken_share: Share
    workers: int


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
    batch_size: int
    learning_rate: float
    hidden: Share
    wordpieces: int


class RetrieverOptions(Section, name="retriever"):
    tower: Literal["bert", "bag"]
    pooling: Literal["auto", "cls", "mean", "last"]
    projection: Literal["orthogonal", "identity", "pca", "random", "first"]
    embedding_width: Count
    head: Literal["paper", "release", "normalised", "cosine"]
    temperature: float
    segments: Literal["auto", "one", "two"]
    document_vectors: int
    share_embedders: bool
    hybrid: bool


class ReaderOptions(Section, name="reader"):
    init: str
    copies: bool
    apart: bool
    matches: bool


class IndexOptions(Section, name="index"):
    type: Literal["auto", "exact", "ivf", "hnsw", "pq"]
    target_recall: Part


class Ict(Section, name="ict"):
    task: Literal["cloze", "crop"]
    crops: int
    steps: Count
    batch_size: int
    learning_rate: float
    query_wordpieces: int
    removal: Share
    neighbours: int
    epochs: Amount
    reader_steps: Count
    reader_batch_size: int
    reader_learning_rate: float
    reader_wordpieces: int
    reader_random_masks: Share
    gradient_checkpointing: bool
    checkpoint_every: int


class Pretrain(Section, name="pretrain"):
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


class Finetune(Section, name="finetune"):
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


class ClosedBookOptions(Section, name="closed_book"):
    init: str
    steps: Count
    batch_size: int
    learning_rate: float
    epochs: Amount
    passage_wordpieces: Annotated[int, 8, math.inf]
    question_wordpieces: Annotated[int, 2, math.inf]
    answer_wordpieces: Annotated[int, 2, math.inf]
    checkpoint_every: int


class Optimiser(Section, name="optimiser"):
    weight_decay: Amount
    clip: float
    bias_correction: bool
    ramp_share: Share
    ramp_min: Count


class Evaluate(Section, name="evaluate"):
    bootstrap: Count
    bm25: bool


class Tracking(Section, name="tracking"):
    enabled: bool
    experiment: str


class _Loader(yaml.SafeLoader):
    """YAML without aliases and without repeated keys, whose words mean what they mean in YAML 1.2, which DVC reads.

    In PyYAML's 1.1 ``no`` is false, ``010`` is 8 and ``1:30`` is 90; here they are text.
    """

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


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag.rpartition(":")[2] in ("null", "merge")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})$"), list(_first))


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a file; ValueError names the file and line of what is wrong."""
    return _sections(_read(path), path)


def read_params(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The names of the presets that a params file starts from, and its sections."""
    found = _read(path)
    presets = (found.pop("presets", None) or []) if isinstance(found, dict) else []
    if not isinstance(presets, list) or not all(isinstance(name, str) for name in presets):
        raise ValueError(f"{_place(path, 'presets')}: presets is {presets!r}; a list of names is wanted, as [squad]")
    return presets, _sections(found, path)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run in the project's folder or name the file with --params")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a params file has at most {LARGEST_FILE}")
    try:
        values: Any = yaml.load(path.read_bytes(), _Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    return {} if values is None else values


def _sections(values: Any, path: Path) -> dict[str, dict[str, Any]]:
    wrong = [n for n, v in values.items() if not isinstance(v, dict | None)] if isinstance(values, dict) else ["this"]
    if wrong:
        what = f"{wrong[0]} is no section: "
        raise ValueError(f"{path}: {what}sections with keys are wanted, as in 'run:' and below it '  seed: 0'")
    return {name: keys or {} for name, keys in values.items()}  # a section may be left empty


@cache
def defaults() -> Values:
    """All sections with the values of defaults.yaml."""
    values = read_yaml(DEFAULTS)
    return {name: asdict(parse_section(name, values[name], str(DEFAULTS))) for name in SECTIONS}


def merge(base: Values, difference: Values, source: str | Path) -> dict[str, dict[str, Any]]:
    """``base`` with the values of ``difference``; a name that ``base`` lacks is an error with ``source`` and line."""
    merged = {section: dict(keys) for section, keys in base.items()}
    for section, keys in difference.items():
        if section not in merged:
            place = _place(source, section)
            raise ValueError(f"{place}: unknown section {section!r}; sections are {_allowed(section, merged)}")
        for key in keys:
            if key not in merged[section]:
                place = _place(source, section, key)
                raise ValueError(f"{place}: unknown key {section}.{key}; its keys are {_allowed(key, merged[section])}")
        merged[section] |= keys
    return merged


def _allowed(name: object, names: Collection[str]) -> str:
    """All names, and the one that was meant, if one is near."""
    near = difflib.get_close_matches(str(name), names, 1)
    return ", ".join(names) + (f"; is {near[0]} meant?" if near else "")


def _place(source: str | Path, *names: object) -> str:
    """A source in words; of a file also the line of a section, or of a section and a key in it."""
    if isinstance(source, str):
        return source
    node: Any = yaml.compose(source.read_bytes(), _Loader)
    line = 0
    for name in names:
        line, node = next(((k.start_mark.line + 1, v) for k, v in node.value if k.value == str(name)), (line, node))
    return f"{source}, line {line}" if line else str(source)


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
    """All sections, checked, laid over each other: the defaults, the presets that a params file names, the file
    itself, then ``presets`` and ``settings``.
    """
    named, own = read_params(path)
    values = checked(own, path, laid(defaults(), [preset_path(name, path) for name in named]))
    values = laid(values, presets)
    for setting in settings:
        values = checked(parse_setting(setting), f"--set {setting}", values)
    check_together(values)
    return values


def laid(values: Values, presets: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """``values`` with those of preset files laid over them, in order, all checked."""
    laid = {section: dict(keys) for section, keys in values.items()}
    for preset in presets:
        laid = checked(read_yaml(preset), preset, laid)
    return laid


def checked(values: Values, source: str | Path, base: Values | None = None) -> dict[str, dict[str, Any]]:
    """``values`` laid over ``base`` or else the defaults; ValueError names what is unknown or wrong."""
    merged = merge(defaults() if base is None else base, values, source)
    return merged | {name: asdict(parse_section(name, merged[name], str(source))) for name in values}


_LATER = {("snapshot", "language"): "en"}  # options that came later, with the value that acts as versions before did


_PLACES = {("pretrain", "builder"), ("pretrain", "exchange")}  # where indexes are built; a cluster sets them itself


def keyed(values: Values) -> dict[str, dict[str, Any]]:
    """The options that make a key: not those that say where indexes are built.

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


def rewritten(path: Path, presets: Sequence[str], settings: Sequence[str]) -> tuple[str, list[str]]:
    """The text of a params file that starts from other presets and has other values; and each change that this makes.

    Comments are kept. What the file has as its presets of before, or as the defaults, becomes what it is now; what a
    person has changed stays.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    named, own = read_params(path)
    names = list(presets) or named
    was, now = (laid(defaults(), [preset_path(name, path) for name in some]) for some in (named, names))
    before = checked(own, path, was)
    kept = {
        section: {key: before[section][key] for key in keys if before[section][key] != was[section][key]}
        for section, keys in own.items()
    }
    after = merge(now, kept, path)
    for setting in settings:
        after = checked(parse_setting(setting), f"--set {setting}", after)
    check_together(after)

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 16
    editor.representer.add_representer(float, _written_float)
    document: Any = editor.load(path.read_text(encoding="utf-8")) or CommentedMap()
    changes = [f"presets: {', '.join(named) or 'none'} -> {', '.join(names)}"] if names != named else []
    if changes:
        listed = CommentedSeq(names)
        listed.fa.set_flow_style()
        if "presets" in document:
            document["presets"] = listed
        else:
            document.insert(0, "presets", listed)
    for section, new in after.items():
        for key, value in new.items():
            if value != before[section][key]:
                changes.append(f"{section}.{key}: {before[section][key]} -> {value}")
            if value == (before if key in own.get(section, ()) else now)[section][key]:
                continue
            if isinstance(value, str) and yaml.safe_load(value) != value:  # YAML 1.1 would take it for something else
                value = DoubleQuotedScalarString(value)
            document[section] = document.get(section) or {}
            document[section][key] = value
    text = StringIO()
    editor.dump(document, text)
    return text.getvalue(), changes


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes where a reader of YAML 1.2 would take it for something else, as 1e5."""


def _written_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = yaml.load(text, _Loader) == text
    except (ValueError, yaml.YAMLError):
        is_plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if is_plain else '"')


_Dumper.add_representer(str, _written_text)


def as_yaml(values: Values) -> str:
    """Sections as a params file has them; every YAML reader takes them for the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, allow_unicode=True, sort_keys=False, default_flow_style=False)
    return text


def _written_float(representer: Any, value: float) -> Any:
    """With a point: without one YAML 1.1, which other readers know alone, takes 1e-05 for a text."""
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    point = ".0" if e and "." not in mantissa else ""
    return representer.represent_scalar("tag:yaml.org,2002:float", f"{mantissa}{point}{e}{exponent}")


def check_together(values: Values) -> None:
    """What one section demands of another; ValueError names both keys."""
    positions = values["bert"]["positions"]
    for section, key in product(values, ("block_wordpieces", "wordpieces", "query_wordpieces", "reader_wordpieces")):
        if values[section].get(key, 0) > positions:
            raise ValueError(
                f"{section}.{key} is {values[section][key]}, but the encoder has bert.positions={positions}; "
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


def _check_towers(values: Values) -> None:
    """What the options of the retriever demand of each other, as far as it is seen without the encoder."""
    options, bert = values["retriever"], values["bert"]
    head, width = options["head"], options["embedding_width"]
    if options["tower"] == "bag":
        vectors = options["document_vectors"]
        for wrong, found, why, remedy in (
            (head != "cosine", f"head {head}", "the vectors of a bag are divided by their length", "head=cosine"),
            (not width, "embedding_width 0", "there is no encoder whose width could be taken", "embedding_width=384"),
            (
                vectors > 1,
                f"document_vectors {vectors}",
                "a bag makes one vector of a passage",
                "document_vectors=1, or retriever.tower=bert",
            ),
        ):
            if wrong:
                raise ValueError(f"retriever.tower is bag and retriever.{found}: {why}; set retriever.{remedy}")
        return
    check_vectors(options["document_vectors"], options["pooling"], options["pooling"])
    other = options["pooling"] in ("mean", "last") or options["projection"] in ("identity", "pca", "first")
    if head == "release" and other:
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
    most = {"first": f"{encoder_width} numbers", "pca": f"no more than {encoder_width} components"}
    if projection in most and width > encoder_width:
        raise ValueError(
            f"retriever.projection is {projection}, and retriever.embedding_width is {width}: the encoder's vectors "
            f"have {most[projection]}; set retriever.embedding_width={encoder_width} or less"
        )


def check_vectors(vectors: int, pooling: str, means: str) -> None:
    """ValueError when a pooling, which ``means`` this one where it is ``auto``, makes fewer vectors of a passage."""
    if vectors > 1 and means in ("cls", "last"):
        raise ValueError(
            f"retriever.document_vectors is {vectors}, and retriever.pooling {pooling} makes one vector, that of "
            f"{'[CLS]' if means == 'cls' else 'the last wordpiece'}; set retriever.pooling=mean, or "
            "retriever.document_vectors=1"
        )


def notes(stages: Collection[str], values: Values) -> Iterator[str]:
    """What is allowed and seldom meant, in words, where one of these stages would do it."""
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
    """Learning rates that were made for the other kind of encoder."""
    init = values["bert"]["init"]
    small = init == "small"
    idle = {"tag"} if values["tag"]["method"] != "tagger" else set()
    idle |= {"finetune"} if values["finetune"]["reader"] in CLOSED_BOOK else set()
    wrong = []
    for stage, key, amount in _RATES:
        rate = values[stage][key]
        learns = stage in stages and stage not in idle and values[stage][amount]
        if learns and (rate < FROM_SCRATCH if small else rate > PRE_TRAINED):
            wrong.append(f"{stage}.{key}={rate:g}")
    if wrong and small:
        yield (
            f"bert.init is small, an encoder from scratch, and {', '.join(wrong)} suits one that is pre-trained: the "
            f"model may learn little. Leave out the preset for such an encoder, or set {FROM_SCRATCH:g} or more"
        )
    elif wrong:
        yield (
            f"bert.init is {init}, a pre-trained encoder, and {', '.join(wrong)} suits one from scratch: it may forget "
            f"what it knows. Add a preset for such an encoder, as minilm, or set {PRE_TRAINED:g} or less"
        )


def parse_section(name: str, values: Mapping[str, Any], source: str = "params") -> Any:
    """One section as its dataclass; ValueError names a key that is unknown, missing, of a wrong type or range."""
    section = SECTIONS[name]
    hints = typing.get_type_hints(section, include_extras=True)
    merge({name: hints}, {name: values}, source)  # an unknown key is refused
    for key in hints:
        if key not in values:
            raise ValueError(f"{source}: the key {name}.{key} is missing; docs/options.md has its default")
    return section(**{key: _checked(values[key], hint, f"{source}: {name}.{key}") for key, hint in hints.items()})


def _checked(value: Any, hint: Any, where: str) -> Any:
    hint, least, most = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, None, math.inf)
    if typing.get_origin(hint) is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(allowed)}")
        return value
    if hint is float and type(value) in (int, str):  # a number may stand in quotation marks
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {value!r} ({type(value).__name__}); {_KIND[hint]} is wanted")
    if hint in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; a finite number is wanted")
        if value <= 0 if least is None else value < least:
            wanted = "more than 0" if least is None else f"at least {least}"
            raise ValueError(f"{where} is {value}; it must be {wanted}")
        if value > most:
            raise ValueError(f"{where} is {value}; it must be at most {most}")
    return value


_KIND = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def preset_path(name: str, params: Path) -> Path:
    """The file of a preset: a path, or a name under ``presets`` beside the params file, else in the package."""
    folders = params.parent / "presets", PACKAGE / "presets"
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    known = {p.relative_to(folder).with_suffix("").as_posix() for folder in folders for p in folder.rglob("*.yaml")}
    raise ValueError(
        f"preset {name!r}: no such file, and none of the presets {', '.join(sorted(known))}, which are realmops' own "
        f"and those in {folders[0]}"
    )
