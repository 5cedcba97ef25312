"""How long a run takes here: the wordpieces that each stage reads and learns from, over the rates that were measured.

The figures are rough: searches, files and the start of processes are left out, and other programs take their share.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops.artifacts import MANIFEST
from realmops.baselines.rankers import DENSE
from realmops.config import Finetune, Ict, Pretrain, Sample, SnapshotOptions, Tag, Values, parse_section
from realmops.corpus.documents import Document
from realmops.corpus.formats import sources
from realmops.corpus.ingest import Progress, batches, convert
from realmops.corpus.questions import read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.stages import CLOZE, HUB, STAGES, external_files, named_below
from realmops.train.finetune import finetune_steps
from realmops.train.held_out import WATCHED
from realmops.train.ict import steps_over
from realmops.train.windows import NEGATIVES_FROM, WINDOW

LOOK_SECONDS = 3.0  # at documents that are not cut into passages yet
WORDPIECES = 1.35  # of a word
SPECIAL = 8  # wordpieces of a passage beside its text: the title and the special ones
QUESTION = 16  # wordpieces
CROP = 12  # wordpieces
TAGGED = 25  # wordpieces of a tagged sentence
SENTENCE = 25  # wordpieces
START_SECONDS = 4.0  # of a stage: its files are read, its models are made
SNAPSHOT_RATE = 100_000  # wordpieces that one process reads and cuts in a second
FORWARD = 3.0  # times as fast as learning
# Of the sample, for each subject: documents, those of a warm-up world, and questions.
SAMPLE_DOCUMENTS, SAMPLE_WORDPIECES, SAMPLE_QUESTIONS = 7.8, 30.0, {"train": 2.7, "dev": 1.0, "test": 1.8}
CLOZE_SHARES = {"train": 0.9, "dev": 0.05, "test": 0.05}  # of the questions that are made, one for two sentences


@dataclass(frozen=True)
class Sizes:
    """What a run works on, counted or guessed."""

    passages: float
    wordpieces: float  # of all passages
    sentences: float
    warmup_wordpieces: float  # of the text beside the documents
    questions: Mapping[str, float]  # by train, dev and test

    @property
    def passage(self) -> float:
        """Wordpieces of a passage as it is embedded."""
        return self.wordpieces / self.passages + SPECIAL

    @property
    def sentence(self) -> float:
        """Wordpieces of a sentence."""
        return self.wordpieces / self.sentences


def sizes_of(values: Values, project: Path, root: Path) -> Sizes | None:
    """The sizes of a run under ``root``; None where documents or questions are not here yet."""
    corpus = _corpus(values, project, root)
    if corpus is None or not corpus[0] or not corpus[1]:
        return None
    passages, wordpieces, sentences, warmup = corpus
    questions: dict[str, float] = {}
    files = {**_files("finetune", values, project, root), **_files("evaluate", values, project, root)}
    for name in ("train", "dev", "test"):
        path = files[f"questions.{name}"]
        inside = {Path(folder) for folder in Path(values["questions"][name]).parents}
        if path.is_file():
            questions[name] = len(read_questions([path], format=values["questions"]["format"]))
        elif Path(CLOZE) in inside:
            questions[name] = CLOZE_SHARES[name] * sentences / 2
        elif Path(STAGES["sample"].folder) in inside:
            questions[name] = SAMPLE_QUESTIONS[name] * values["sample"]["subjects"]
        else:
            return None
    return Sizes(passages, wordpieces, sentences, warmup, questions)


def _files(stage: str, values: Values, project: Path, root: Path) -> dict[str, Path]:
    return external_files(STAGES[stage], values, project, root)


def _corpus(values: Values, project: Path, root: Path) -> tuple[float, float, float, float] | None:
    """Passages, their wordpieces and sentences, and the wordpieces of the warm-up text."""
    folder = root / STAGES["snapshot"].folder
    if (folder / "corpus" / MANIFEST).is_file():
        corpus = Snapshot.open(folder / "corpus", verify=False)
        beside = folder / "warmup"
        beside_wordpieces = len(Snapshot.open(beside, verify=False).tokens) if beside.is_dir() else 0
        return len(corpus), len(corpus.tokens), len(corpus.sentence_rows), beside_wordpieces
    options: SnapshotOptions = parse_section("snapshot", values["snapshot"])
    sample: Sample = parse_section("sample", values["sample"])
    documents = _files("snapshot", values, project, root)["snapshot.documents"]
    if documents.exists():
        passages, wordpieces = look_at(documents, options)
    elif named_below(STAGES["sample"].folder, ("snapshot",), values) and not options.documents.startswith(HUB):
        passages = sample.subjects * SAMPLE_DOCUMENTS
        wordpieces = passages * SAMPLE_WORDPIECES
    else:
        return None
    of_sample = named_below(STAGES["sample"].folder, STAGES, values) and options.use_warmup
    warmup = sample.warmup_worlds * sample.subjects * SAMPLE_DOCUMENTS * SAMPLE_WORDPIECES if of_sample else 0.0
    return passages, wordpieces, wordpieces / SENTENCE, warmup


def look_at(documents: Path, options: SnapshotOptions) -> tuple[float, float]:
    """About how many passages and wordpieces documents make, by those that are read in ``LOOK_SECONDS``."""
    found = sources(documents, options.format)
    read = 0

    def tell(done: int) -> None:
        nonlocal read
        read += done

    progress = Progress(found, tell)
    room = options.block_wordpieces - SPECIAL
    passages = wordpieces = 0.0
    end, share = time.monotonic() + LOOK_SECONDS, 1.0
    for batch in batches(found):
        for outcome in convert([(found[number].format.name, records) for number, records in batch.runs]):
            if isinstance(outcome, Document):
                length = WORDPIECES * len(outcome.text.split())
                parts = 1.0 if options.whole_documents else max(1.0, length / max(room, 1))
                passages += parts
                wordpieces += min(length, parts * room)
        progress(batch)
        if time.monotonic() > end and read:
            share = read / max(sum(source.size for source in found), 1)
            break
    return passages / share, wordpieces / share


def work_of(values: Values, sizes: Sizes) -> dict[str, dict[str, float]]:
    """What each stage does: wordpieces that are cut, embedded or read, and those that models learn from; REALM's steps.

    ``finetune.reader: t5`` counts as a reader that learns.
    """
    ict: Ict = parse_section("ict", values["ict"])
    pretrain: Pretrain = parse_section("pretrain", values["pretrain"])
    passages, passage, sentence, text = sizes.passages, sizes.passage, sizes.sentence, sizes.wordpieces
    tag: Tag = parse_section("tag", values["tag"])
    found: dict[str, dict[str, float]] = {"snapshot": {"cut": text + sizes.warmup_wordpieces}, "tag": {}}
    if tag.method == "tagger":
        found["tag"]["read"] = text + sizes.warmup_wordpieces
        found["tag"]["reader learns"] = tag.steps * tag.batch_size * min(TAGGED, tag.wordpieces)
    queries = sentence if ict.task == "cloze" else ict.crops * CROP
    warmup = sizes.warmup_wordpieces or text
    steps, _ = steps_over(round(passages), ict)
    _, reader_steps = steps_over(round(passages * warmup / text), ict)
    found["ict"] = {
        "retriever learns": steps * min(ict.batch_size, passages) * (passage + queries),
        "reader learns": reader_steps * ict.reader_batch_size * (sentence + min(passage, ict.reader_wordpieces)),
    }
    found["pretrain"] = {}
    if pretrain.steps:
        indexes = 2 + pretrain.steps // pretrain.refresh_every
        masked = min(pretrain.masked_sentences, sizes.sentences / 10)
        beside = pretrain.documents * (sentence + min(passage, pretrain.reader_wordpieces))
        found["pretrain"] = {
            "steps": pretrain.steps,
            "embedded": indexes * passages * passage,
            "read": (masked + indexes * min(masked, WATCHED)) * beside,
        }
    found["finetune"] = _tuned(parse_section("finetune", values["finetune"]), values, sizes)
    answer = _answer(parse_section("finetune", values["finetune"]), sizes)
    twice = 1 + bool(values["evaluate"]["bm25"])
    found["evaluate"] = {"read": twice * sizes.questions["test"] * answer, "embedded": 2 * passages * passage}
    return found


def _answer(options: Finetune, sizes: Sizes) -> float:
    """Wordpieces that are read for a question."""
    each = min(sizes.passage + QUESTION, options.reader_wordpieces)
    return min(options.reader_candidates, sizes.passages) * each if options.reads_passages else QUESTION


def _tuned(options: Finetune, values: Values, sizes: Sizes) -> dict[str, float]:
    train, dev = sizes.questions["train"], sizes.questions["dev"]
    found = {"read": dev * _answer(options, sizes), "retriever learns": 0.0, "embedded": 0.0}
    if not options.reads_passages:
        own = values["closed_book"]
        corrupted = own["steps"] * own["batch_size"] * min(own["passage_wordpieces"], sizes.passage)
        return {"reader learns": corrupted + own["epochs"] * train * 2 * QUESTION}
    if options.retriever in DENSE:
        found["embedded"] = sizes.passages * sizes.passage
        if options.retriever_training == "passages":
            epoch = min(sizes.passages, train) * sizes.passage + train * QUESTION
            found["retriever learns"] = options.retriever_epochs * epoch
        else:
            found["retriever learns"] = options.epochs * train * QUESTION
    if options.reader_training == "windows":
        learned = (2 - NEGATIVES_FROM) * (min(WINDOW, sizes.passage) + QUESTION)
    else:
        learned = _answer(options, sizes)
    batches_read = finetune_steps(max(1, round(train)), options) * min(options.batch_size, train)
    return found | {"reader learns": batches_read * learned}


def seconds_of(
    work: Mapping[str, Mapping[str, float]], measured: Mapping[str, Any], workers: int = 1
) -> dict[str, float]:
    """The seconds of each stage at the rates that were measured."""
    reader = measured["reader_wordpieces_per_second"]
    each = {
        "cut": 1 / (SNAPSHOT_RATE * workers),
        "embedded": 1 / (measured["documents_per_second"] * measured["passage_wordpieces"]),
        "read": 1 / (FORWARD * reader),
        "reader learns": 1 / reader,
        "retriever learns": 1 / measured["retriever_wordpieces_per_second"],
        "steps": measured["step_seconds"],
    }
    return {
        stage: START_SECONDS + sum(amount * each[kind] for kind, amount in kinds.items())
        for stage, kinds in work.items()
    }


def told(sizes: Sizes | None, seconds: Mapping[str, float], shown: Callable[[float], str]) -> list[str]:
    """In words; ``shown`` writes seconds."""
    if sizes is None:
        return [
            "How long this run takes is not known: documents or questions are not here yet. Run the first stages, or "
            "name files that are here."
        ]
    counted = ", ".join(f"{sizes.questions[name]:,.0f} {name}" for name in ("train", "dev", "test"))
    parts = ", ".join(f"{stage} {shown(one)}" for stage, one in seconds.items())
    return [
        f"This run takes about {shown(sum(seconds.values()))} here, half of that to twice that: {parts}. "
        f"It has {sizes.passages:,.0f} passages, and questions: {counted}."
    ]


def begins(names: Collection[str], values: Values) -> str:
    """What a run of several stages is about to do, from its options alone, and who knows the minutes."""
    steps = {
        "tag": values["tag"]["steps"] * (values["tag"]["method"] == "tagger"),
        "ict": values["ict"]["steps"] + values["ict"]["reader_steps"],
        "pretrain": values["pretrain"]["steps"],
    }
    parts = [f"{name} {steps[name]:,}" for name in names if steps.get(name)]
    told = [f"at most so many steps of training: {', '.join(parts)}"] if parts else []
    told += [f"finetune, epochs over the questions: {values['finetune']['epochs']:g}"] if "finetune" in names else []
    minutes = '"realmops plan" with the same options says how many minutes that takes here'
    return "; ".join([f"run: {len(names)} stages", *told, minutes])
