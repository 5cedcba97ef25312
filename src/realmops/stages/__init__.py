"""The pipeline as data: which stages there are, what each reads, and the one way to run one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from realmops import artifacts
from realmops.corpus.documents import shown
from realmops.corpus.walk import files_below
from realmops.journal import Journal

JOURNAL = "metrics.jsonl"
METRICS = "metrics.json"
PUBLISHED = "data/published"  # passages that were imported with a checkpoint
CLOZE = "data/cloze"  # questions that were made from the corpus
CORPUS = "corpus"  # folder of the snapshot that is searched, below that of its stage
HUB = "hf:"
ENCODER = "encoder"  # reader.init: the reader starts as the encoder

if TYPE_CHECKING:  # the command line loads this module, and pydantic takes .2 seconds
    from realmops.config import Section, Values
Options = TypeVar("Options", bound="Section")


class Report(Protocol):
    """Where a stage says what it does."""

    def say(self, message: str) -> None:
        """A line of information."""

    def warn(self, message: str) -> None:
        """A line that a person should act on."""

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """A bar; the function takes the number of units done since its last call; the unit "B" is shown in MB."""


class Silent:
    """A report of which nobody hears."""

    def say(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        return lambda done: None


@dataclass(frozen=True)
class Job:
    """What one run of a stage is given."""

    sections: Mapping[str, Any]  # models of config, by name
    inputs: Mapping[str, Path]
    out: Path  # the stage's folder, committed when it returns
    work: Path  # outlives a killed process; empty on the first try
    journal: Journal
    report: Report
    offer: Path  # the file that tells index builders what they can help with
    presets: Sequence[str] = ()  # their names, for people

    def section(self, kind: type[Options]) -> Options:
        """Return the options of one section, by their type; KeyError where the stage does not declare it."""
        options: Options = self.sections[kind.section]
        return options


@dataclass(frozen=True)
class Stage:
    """One stage: the params sections and earlier stages that it reads, and the folder that it writes.

    ``files`` are the keys (section.key) that name files from outside the pipeline; ``optional`` are needs whose
    folder may be absent, as when a model was imported or the corpus is somebody else's.
    """

    name: str
    what: str  # it does, in a sentence
    sections: tuple[str, ...]
    needs: tuple[str, ...]
    folder: str
    files: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("sample",)

    def run(self, job: Job) -> dict[str, Any]:
        """Do the work of ``stages/<name>.py``; returns its metrics."""
        module = importlib.import_module(f"realmops.stages.{self.name}")
        metrics: dict[str, Any] = module.run(job)
        return metrics


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("sample", "Make an invented encyclopedia, with questions about it.", ("sample",), (), "data/sample"),
        Stage(
            "snapshot",
            "Cut documents into passages, make the vocabulary, index the words for BM25.",
            ("snapshot", "bert"),
            ("sample",),
            "data/snapshot",
            ("snapshot.documents", "snapshot.warmup"),
        ),
        Stage(
            "tag",
            "Find the names and dates that may be masked; a tagger for names is trained here.",
            ("run", "bert", "tag", "optimiser"),
            ("sample", "snapshot"),
            "data/spans",
            ("tag.train", "tag.dev"),
        ),
        Stage(
            "ict",
            "Give the retriever (inverse cloze task) and the reader (masked words) a warm start.",
            ("run", "bert", "retriever", "reader", "ict", "optimiser"),
            ("snapshot", "tag"),
            "models/ict",
        ),
        Stage(
            "pretrain",
            "REALM: train retriever and reader together while the index is rebuilt in the background.",
            ("run", "index", "pretrain", "optimiser", "questions"),
            ("sample", "snapshot", "tag", "ict"),
            "models/pretrain",
            ("questions.dev",),
        ),
        Stage(
            "finetune",
            "Fine-tune retriever and reader to answer questions.",
            ("run", "index", "reader", "finetune", "closed_book", "optimiser", "questions"),
            ("sample", "snapshot", "ict", "pretrain"),
            "models/finetune",
            ("questions.train", "questions.dev", "reader.init"),
            ("sample", "ict"),
        ),
        Stage(
            "evaluate",
            "Measure exact match, recall and what bounds them; write predictions and the report.",
            ("run", "finetune", "evaluate", "questions"),
            ("sample", "snapshot", "ict", "pretrain", "finetune"),
            "results",
            ("questions.train", "questions.test"),
            ("sample", "ict", "pretrain"),
        ),
    )
}


def parse_sections(stage: Stage, values: Values) -> dict[str, Any]:
    """Return the stage's sections as models; it sees no other."""
    from realmops.config import parse_section

    return {name: parse_section(name, values[name]) for name in stage.sections}


def external_files(stage: Stage, values: Values, project: Path, root: Path) -> dict[str, Path]:
    """The files that a stage's options name, by section.key.

    Relative names start at the project; those inside a stage's folder (data/sample/...), or among what was
    imported or made of the corpus, at the root of the run.  The name of a dataset on the hub (hf:...) stays as it is.
    """
    found = {}
    for key in stage.files:
        name = option_of(values, key)
        if not name:
            raise ValueError(f"{key} is empty: nothing cannot be read; check the path")
        start = root if _made_here(Path(name)) else project
        found[key] = Path(name) if name.startswith(HUB) else start / name
    return found


def option_of(values: Values, key: str) -> Any:
    section, option = key.split(".")
    return values[section][option]


def _made_here(name: Path) -> bool:
    """Whether a file lies in a stage's folder, or among what was imported or made of the corpus."""
    return any(Path(folder) in name.parents for folder in (PUBLISHED, CLOZE, *(s.folder for s in STAGES.values())))


def _needless(values: Values) -> set[str]:
    """The keys of files that other options make superfluous."""
    found = set() if values["snapshot"]["use_warmup"] else {"snapshot.warmup"}
    found |= set() if values["tag"]["method"] == "tagger" else {"tag.train", "tag.dev"}
    return found if values["reader"]["init"] != ENCODER else found | {"reader.init"}


def in_use(stage: Stage, values: Values) -> list[str]:
    """The keys of the files that a stage reads with these options."""
    return [key for key in stage.files if key not in _needless(values)]


def named_below(folder: str, names: Collection[str], values: Values) -> bool:
    """Whether an option in use of one of these stages names a file in a folder of the run."""
    files = (option_of(values, key) for name in names for key in in_use(STAGES[name], values))
    return any(Path(folder) in Path(file).parents for file in files)


def reads_spans(values: Values) -> bool:
    """Whether salient spans are read: by the reader's warm start, by pre-training, or to make questions of."""
    return bool(values["ict"]["reader_steps"] or values["pretrain"]["steps"] or named_below(CLOZE, STAGES, values))


def chain(values: Values) -> tuple[str, ...]:
    """All stages in their order, without the sample where nothing of it is read, and without the tagger likewise."""
    needless = set() if reads_spans(values) else {"tag"}
    needless |= set() if named_below(STAGES["sample"].folder, {*STAGES} - needless, values) else {"sample"}
    return tuple(name for name in STAGES if name not in needless)


def outside_files(values: Values, project: Path) -> dict[str, Path]:
    """The files that the chain reads and that nothing of ours makes, by section.key."""
    return {
        key: path
        for stage in STAGES.values()
        for key, path in external_files(stage, values, project, project).items()
        if key not in _needless(values) and not _made_here(Path(option_of(values, key)))
    }


def check_files(names: Collection[str], values: Values, project: Path, root: Path) -> None:
    """ValueError for the first file that one of these stages wants from outside and that is not there.

    Asked before the first of them runs: what is missing at the last would cost all the others.
    """
    needless = _needless(values)
    for name in names:
        for key, path in external_files(STAGES[name], values, project, root).items():
            value = option_of(values, key)
            maker = next((one.name for one in STAGES.values() if Path(one.folder) in Path(value).parents), "")
            cloze = Path(CLOZE) in Path(value).parents
            if key in needless or value.startswith(HUB) or path.exists() or ("tag" if cloze else maker) in names:
                continue
            advice = f"run the stage {maker} first, or name a file of your own" if maker else "check the path"
            if cloze:
                advice = "run 'realmops cloze' with the same options, which makes it of the corpus"
            advice += {
                "snapshot.warmup": ", or set snapshot.use_warmup=false: the reader then starts from the documents",
                "tag.train": ", or set tag.method to dates, or to given where documents carry spans",
            }.get(key, "")
            raise ValueError(f"{key} is {value!r}, and {path} does not exist; {advice}")


def fingerprint(stage: Stage, values: Values, inputs: Mapping[str, Path]) -> str:
    """A digest of everything that a stage's output depends on: its options and the content of its inputs.

    The metrics of an earlier stage do not count: they hold the seconds that it took. Nor does where indexes are built.
    """
    from realmops.config import keyed

    content: dict[str, Any] = {}
    for name, path in sorted(inputs.items()):
        if name in stage.needs:
            files = artifacts.read_json(path / artifacts.MANIFEST)["files"]
            content[name] = {file: entry for file, entry in files.items() if file not in (JOURNAL, METRICS)}
        else:
            content[name] = content_of(path)
    sections = keyed(deciding(stage, values))
    return artifacts.digest_of({"stage": stage.name, "sections": sections, "inputs": content})


def deciding(stage: Stage, values: Values) -> dict[str, dict[str, Any]]:
    """The options that a stage's output depends on: its sections without the files that other stages alone read."""
    others = {key for one in STAGES.values() for key in one.files} - {*stage.files}
    return {
        section: {key: value for key, value in values[section].items() if f"{section}.{key}" not in others}
        for section in stage.sections
    }


def content_of(path: Path) -> Any:
    """Return the digest of a file, or of each file that a reader finds in a folder; None for what cannot be read."""
    if path.is_dir():
        return {shown(file.relative_to(path)): _digest_of_file(file) for file in files_below(path)}
    return _digest_of_file(path)


def _digest_of_file(path: Path) -> str | None:
    return artifacts.sha256_file(path) if os.path.isfile(path) else None  # of a pipe or the like there is none
