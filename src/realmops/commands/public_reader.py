"""``realmops reader``: train a reader on public questions, and write it in transformers' format."""

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realmops import artifacts, config
from realmops.config import PACKAGE
from realmops.hub import READER, encoder_folder, is_sentence_encoder
from realmops.inputs.resolve import check_hub_name
from realmops.options import Options
from realmops.progress import Report
from realmops.stages import METRICS, STAGES
from realmops.stages.runner import stage_lock
from realmops.starter.choose_models import ENCODER, is_wide
from realmops.starter.public_data import SQUAD, download, read_squad, stable_hash, write_squad

PRESET = "public-reader"
TRAINED = ("snapshot", "ict", "pretrain", "finetune")
DATA = "data/public"  # of the preset, in the work folder
DEV_QUESTIONS = 300  # for the calibration, which has two parameters and a threshold
QUESTIONS_PER_PASSAGE = 2  # of the about four that SQuAD has: different passages teach more
WIDE_LEARNING_RATE = 5.0e-5
ALL_PASSAGES = 1 << 30
KIND = "trained reader"  # manifest kind, which "export" does not replace

Row = dict[str, Any]


@dataclass(frozen=True)
class ReaderTraining:
    """A training that is about to run."""

    folder: Path  # folder of the reader, written at the end
    work: Path  # the root of the training, from which a killed training resumes
    encoder: str  # folder or name of the encoder
    options: Options
    counts: Mapping[str, int]  # training questions, and the paragraphs and articles that they are about

    def write(self) -> Iterator[str]:
        """Write the reader after the stages ``TRAINED`` have run, and remove the work folder; yield next commands."""
        from realmops.commands.card import public_reader_card
        from realmops.commands.export import write_reader
        from realmops.opening import open_run

        opened = open_run(self.work)
        metrics = artifacts.read_json(self.work / STAGES["finetune"].folder / METRICS)
        text = public_reader_card(opened, self.encoder, self.counts, metrics)
        write_reader(self.folder, opened, text, KIND)
        shutil.rmtree(self.work)
        yield f"{self.folder}: a reader for AutoModelForQuestionAnswering of transformers, with README.md as its card"
        yield f"next: realmops init --documents DOCUMENTS --reader {self.folder}"


@contextmanager
def reader_training(
    folder: Path, encoder: str | None, questions: int, source: Path | None, report: Report
) -> Iterator[ReaderTraining]:
    """Check the inputs and write the training data into a locked folder below ``WORK_FOLDER`` next to ``folder``."""
    final = folder.resolve()
    artifacts.check_replaceable(final, KIND)
    init = encoder or ENCODER
    if Path(init).is_dir():
        init = str(Path(init).resolve())
    else:
        check_hub_name(init, Path())
    place = encoder_folder(init, replace(READER, option="--encoder", name="encoder", fallback=ENCODER))
    work = final.parent / artifacts.WORK_FOLDER / "reader" / final.name
    squad, notes = read_squad(source or _downloaded(work, report), ALL_PASSAGES)
    for note in notes:
        report.warn(note)
    records = _sample(squad, {"questions.train": questions, "questions.dev": DEV_QUESTIONS})
    asked = {question["passage_id"] for question in records["questions.train"]}
    titles = [passage["title"] for passage in records["passages"] if passage["id"] in asked]
    counts = {"questions": len(records["questions.train"]), "paragraphs": len(titles), "articles": len({*titles})}
    with stage_lock(work / artifacts.WORK_FOLDER, "reader"):
        report.log(
            f"reader: {counts['questions']:,} questions about {counts['articles']:,} articles of SQuAD 1.1 train it, "
            f"{len(records['questions.dev']):,} about other articles calibrate it; if the command is stopped, the same "
            f"command resumes from {work}"
        )
        for _ in write_squad(work / DATA, records):
            pass
        yield ReaderTraining(final, work, init, _options(init, place), counts)


def _downloaded(work: Path, report: Report) -> Path:
    path = work / "downloads" / SQUAD.name
    if not path.is_file():
        report.log(f"reader: downloading {SQUAD.url}")
        content = download(SQUAD)
        artifacts.make_folder(path.parent)
        artifacts.write_bytes(path, content)
    return path.parent


def _sample(squad: Mapping[str, list[Row]], counts: Mapping[str, int]) -> dict[str, list[Row]]:
    records: dict[str, list[Row]] = {}
    chosen: set[str] = set()
    for name, count in counts.items():
        passages = _choose({row["passage_id"] for row in squad[name]}, math.ceil(count / QUESTIONS_PER_PASSAGE))
        ids = _choose({row["id"] for row in squad[name] if row["passage_id"] in passages}, count)
        records[name] = [row for row in squad[name] if row["id"] in ids]
        chosen |= passages
    return records | {"passages": [row for row in squad["passages"] if row["id"] in chosen]}


def _choose(ids: Iterable[str], count: int) -> set[str]:
    return {*sorted(ids, key=lambda name: stable_hash(f"reader:{name}"))[:count]}


def _options(init: str, encoder: Path) -> Options:
    own: dict[str, dict[str, Any]] = {"reader": {"init": init}, "retriever": {"init": init}}
    if not is_sentence_encoder(encoder):
        own["retriever"]["pooling"] = "mean"  # their [CLS] retrieves little
    if is_wide(str(encoder)):
        own["finetune"] = {"reader_learning_rate": WIDE_LEARNING_RATE}
    preset = config.preset_layers([PACKAGE / "presets" / f"{PRESET}.yaml"], PACKAGE)
    return config.parse_options(*preset, ("realmops reader", own))
