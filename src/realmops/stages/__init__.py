"""The pipeline as data: the table of stages, their inputs and fingerprints."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from realmops import artifacts
from realmops.artifacts import STAGE_FOLDERS
from realmops.hub import HUB
from realmops.inputs.resolve import content_digests
from realmops.journal import JOURNAL as JOURNAL
from realmops.journal import METRICS as METRICS
from realmops.journal import Journal
from realmops.progress import Report
from realmops.stages.option_inputs import (
    CLOZE,
    FILES,
    MODELS,
    NO_MODEL,
    is_stage_output,
    unused_inputs,
)

HEADLINE = "headline.json"  # of evaluate: the metrics that DVC shows
MACHINE = "machine.json"  # in the work folder: what decides numbers and depends on the machine
CORPUS = "corpus"  # folder of the searched snapshot, below that of its stage
INIT = "retriever.init"  # option of the encoder of retriever, reader and tagger
READER_INIT = "reader.init"  # option of the reader that answers
HEADLINE_METRICS = {  # metrics printed for stages that have many
    "finetune": ("questions", "span_loss", "dev_em", "dev_f1", "dev_answered", "dev_answered_precision", "seconds"),
    "evaluate": (
        *("questions", "em", "f1", "rule_em", "closed_book_em", "recall_at_5", "ndcg_at_10", "mrr_at_10", "map_at_100"),
        *("recall_at_100_judged", "ceiling_in_corpus"),
        *("answered", "answered_precision", "seconds"),
    ),
}
READER_SHAPE = ("reader.copies", "reader.apart", "reader.matches")  # options of the reader of masked words

if TYPE_CHECKING:  # the command line imports this module, and pydantic takes 0.2 s
    from realmops.config import Values
    from realmops.option_types import Section
    from realmops.options import Options
SectionOptions = TypeVar("SectionOptions", bound="Section")


@dataclass(frozen=True)
class Job:
    """Options, inputs and folders of one run of a stage."""

    sections: dict[str, Any]  # sections by name, single options by section.key
    inputs: Mapping[str, Path]
    out: Path  # output folder, committed when the stage succeeds
    work: Path  # for checkpoints; survives a killed process
    journal: Journal
    report: Report
    offer: Path  # file that offers shards of the work to index builders
    presets: Sequence[str] = ()  # names, for the report

    def section(self, kind: type[SectionOptions]) -> SectionOptions:
        """Return the options of one section by their type; KeyError if the stage does not declare the section."""
        from realmops.options import SECTION_NAMES

        options: SectionOptions = self.sections[SECTION_NAMES[kind]]
        return options


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline."""

    name: str
    what: str  # one sentence on what it does
    sections: tuple[str, ...]  # sections of params that it reads
    needs: tuple[str, ...]  # earlier stages whose output it reads
    files: tuple[str, ...] = ()  # options (section.key) that name files it reads
    # Stages among ``needs`` whose output may be absent, because a model or the corpus was imported
    optional: tuple[str, ...] = ("sample",)
    options: tuple[str, ...] = ()  # single options (section.key) that it reads from other sections
    # Raised when the same options and inputs give another output, for example by a reader of documents that reads more
    version: int = 1

    @property
    def folder(self) -> str:
        return STAGE_FOLDERS[self.name]

    def reads(self, key: str) -> bool:
        return key in self.options or key.partition(".")[0] in self.sections

    def run(self, job: Job) -> dict[str, Any]:
        module = importlib.import_module(f"realmops.stages.{self.name}")
        metrics: dict[str, Any] = module.run(job)
        return metrics


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("sample", "Generate an invented encyclopedia with questions about it.", ("sample",), ()),
        Stage(
            "snapshot",
            "Split documents into passages, train the vocabulary, build the BM25 index.",
            ("snapshot", "bert"),
            ("sample",),
            ("snapshot.documents", "snapshot.warmup"),
            options=(INIT,),
            version=2,
        ),
        Stage(
            "tag",
            "Find the salient spans (names and dates); train a tagger for names.",
            ("run", "bert", "tag", "optimiser"),
            ("sample", "snapshot"),
            ("tag.train", "tag.dev"),
            options=(INIT,),
        ),
        Stage(
            "ict",
            "Warm-start the retriever (inverse cloze task) and the reader (masked words).",
            ("run", "bert", "retriever", "ict", "optimiser"),
            ("snapshot", "tag"),
            options=(*READER_SHAPE, "pretrain.reader_wordpieces"),
        ),
        Stage(
            "pretrain",
            "REALM: train retriever and reader together while the index is rebuilt in the background.",
            ("run", "index", "pretrain", "optimiser", "questions"),
            ("sample", "snapshot", "tag", "ict"),
            ("questions.dev",),
        ),
        Stage(
            "finetune",
            "Fine-tune retriever and reader to answer questions.",
            ("run", "index", "finetune", "closed_book", "optimiser", "questions"),
            ("sample", "snapshot", "ict", "pretrain"),
            ("questions.train", "questions.dev"),
            ("sample", "ict"),
            (READER_INIT,),
            version=2,
        ),
        Stage(
            "evaluate",
            "Measure exact match, recall and their upper bounds; write predictions and the report.",
            ("run", "finetune", "evaluate", "questions"),
            ("sample", "snapshot", "ict", "pretrain", "finetune"),
            ("questions.train", "questions.test"),
            ("sample", "ict", "pretrain"),
        ),
    )
}


CLOZE_STEP = "cloze"  # generates questions from the corpus; a step of the plan without a stage
STEP_FOLDERS = {CLOZE_STEP: CLOZE} | {stage.name: stage.folder for stage in STAGES.values()}
STEPS = tuple(step for name in STAGES for step in ((name, CLOZE_STEP) if name == "tag" else (name,)))


def resolve_models(options: Options, project: Path) -> Options:
    """Return the options with models as folders of the project or ``hf:NAME``, never those of the working directory."""
    models = {key: name for key in MODELS if (name := options.get(key)) and name not in NO_MODEL[key]}
    is_here = {key: (project / name).is_dir() or Path(name).is_absolute() for key, name in models.items()}
    return options.replace(
        {key: str(project / name) if is_here[key] else f"{HUB}{name.removeprefix(HUB)}" for key, name in models.items()}
    )


def stage_options(stage: Stage, options: Options) -> dict[str, Any]:
    """Return what a stage declares: its sections by name, its single options by section.key."""
    return {name: options.get(name) for name in (*stage.sections, *stage.options)}


def option_files(stage: Stage, options: Options, project: Path, root: Path) -> dict[str, Path]:
    """Return the files that a stage's options name, by section.key.

    Relative names are resolved against the project; those in the output of a stage (data/sample/...), and imported or
    generated data, against the root of the run. Names of datasets on the hub (hf:...) are returned unchanged.
    """
    paths = {}
    for key in stage.files:
        name = options.get(key)
        if not name:
            if key in unused_inputs(options):
                continue
            raise ValueError(f"{key} is empty; set it to a file or folder")
        base = root if is_stage_output(name) else project
        paths[key] = Path(name) if name.startswith(HUB) else base / name
    return paths


def files_in_use(stage: Stage, options: Options) -> list[str]:
    return [key for key in stage.files if key not in unused_inputs(options)]


def has_file_below(folder: str, names: Collection[str], options: Options) -> bool:
    files = (options.get(key) for name in names for key in files_in_use(STAGES[name], options))
    return any(Path(folder) in Path(file).parents for file in files)


def reads_spans(options: Options) -> bool:
    """Return whether salient spans are needed: by the reader's warm start, pre-training or generated questions."""
    return bool(options.ict.reader_steps or options.pretrain.steps or has_file_below(CLOZE, STAGES, options))


def stages_to_run(options: Options) -> tuple[str, ...]:
    """Return the stages to run, in order.

    ``sample`` and ``tag`` are skipped if nothing reads their output, and ``evaluate`` without test questions.
    """
    skipped = (set() if reads_spans(options) else {"tag"}) | (set() if options.questions.test else {"evaluate"})
    skipped |= set() if has_file_below(STAGES["sample"].folder, {*STAGES} - skipped, options) else {"sample"}
    return tuple(name for name in STAGES if name not in skipped)


def planned_steps(options: Options) -> tuple[str, ...]:
    """Return the steps of a training, in order: ``stages_to_run``, and ``cloze`` if one of them reads its questions.

    ``realmops run all``, the dvc.yaml of a new project and the tasks of the Kubeflow pipeline follow this plan.
    """
    stages = stages_to_run(options)
    needed = {*stages} | ({CLOZE_STEP} if has_file_below(CLOZE, stages, options) else set())
    return tuple(step for step in STEPS if step in needed)


def fingerprint(stage: Stage, options: Options, inputs: Mapping[str, Path]) -> str:
    """Return a digest of everything that a stage's output depends on: version, options and the content of its inputs.

    Metrics of earlier stages are excluded, because they contain wall-clock times, and so are the places of inputs and
    of indexes.
    """
    content: dict[str, Any] = {}
    for name, path in sorted(inputs.items()):
        if name in stage.needs:
            files = artifacts.read_json(path / artifacts.MANIFEST)["files"]
            content[name] = {file: entry for file, entry in files.items() if file not in (JOURNAL, METRICS)}
        else:
            content[name] = content_digests(path)
    sections = fingerprint_options(stage, options.cache_key())
    for key in (*FILES, *MODELS):
        section, _, name = key.partition(".")
        value = sections.get(section, {}).get(name, "")
        if value and (key in MODELS or not value.startswith(HUB)) and not is_stage_output(value):
            sections[section][name] = PurePath(value.removeprefix(HUB)).name
    version = {"version": stage.version} if stage.version > 1 else {}
    return artifacts.digest_of({"stage": stage.name, "sections": sections, "inputs": content, **version})


def fingerprint_options(stage: Stage, values: Values) -> dict[str, dict[str, Any]]:
    """Return those of all options that a stage's output depends on, by section.

    These are its sections without the files that only other stages read, and its single options.
    """
    foreign = {key for other in STAGES.values() for key in other.files} - {*stage.files}
    chosen = {
        section: {key: value for key, value in values[section].items() if f"{section}.{key}" not in foreign}
        for section in stage.sections
    }
    for key in stage.options:
        section, _, name = key.partition(".")
        chosen.setdefault(section, {})[name] = values[section][name]
    return chosen
