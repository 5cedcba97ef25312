"""``realmops update``: change the corpus of a trained model without training (appendix C of the paper)."""

import itertools
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts
from realmops.answering.corpus_states import RESULTS, UPDATES, CorpusState, model_digest, pipeline_state, states
from realmops.answering.record import preview
from realmops.artifacts import UPDATE, WORK_FOLDER
from realmops.config import parse_sections
from realmops.corpus.snapshot_reader import PLACES, REJECTS, SOURCES, TEXTS, Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.devices import device_and_dtype
from realmops.evaluate.predictions import PREDICTIONS, Prediction, read_predictions
from realmops.evaluate.run_report import FigureTable
from realmops.inputs.resolve import local_cache
from realmops.journal import Journal
from realmops.model.retriever_files import load_retriever
from realmops.options import Options
from realmops.process import configure_process
from realmops.progress import Report
from realmops.questions.question_sets import assign_languages, read_questions, text_key
from realmops.readers.ocr import find_data
from realmops.readers.sources import list_sources
from realmops.search import bm25
from realmops.search.bm25_writer import write_bm25
from realmops.search.embeddings import INDEX, embed_changed, indexed_tower, load_index, save_index
from realmops.stages import JOURNAL, METRICS, STAGES, Job, evaluate, option_files, stage_options
from realmops.stages.run_inputs import take_inputs
from realmops.stages.runner import stage_lock
from realmops.stages.snapshot import snapshot_counts, warn_of_omitted, warn_of_rejects

ANSWERS = "answers"  # manifest kind of an update's answers
CHANGES = f"{RESULTS}/changed_answers.jsonl"
COMPARED = ("em", "recall_at_5", "ndcg_at_10")  # metrics before and after
_SHOWN = 10  # changed answers on the terminal
_EVIDENCE_CHARACTERS = 60


@dataclass(frozen=True)
class _Task:
    """One update: its options, the states it starts from, and the folder of its unfinished work."""

    options: Options
    project: Path
    root: Path
    report: Report
    before: CorpusState
    answered: CorpusState | None  # the newest state with answers; None without test questions
    old: Snapshot
    work: Path


def update(
    options: Options, *, project: Path, root: Path, report: Report, may_shrink: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """Read ``snapshot.documents`` again and publish a new corpus with its index in updates/; None if up to date.

    Results are added last, so a server switches at once. Unless ``may_shrink``, half of the passages must be left.
    """
    files = {*STAGES["snapshot"].files, *STAGES["evaluate"].files}
    with stage_lock(root / WORK_FOLDER, UPDATE):
        options, _ = take_inputs(options, project, root, local_cache(), report, files.__contains__)
        before, answered = _checked_states(options, project, root)
        old = Snapshot.open(before.snapshot / "corpus")
        if (before.finetune / INDEX).is_file():
            load_index(before.finetune, old)  # fail early if it is of another corpus
        work = root / WORK_FOLDER / "work" / UPDATE
        shutil.rmtree(work, ignore_errors=True)  # of a killed update
        work.mkdir(parents=True)
        try:
            return _update(_Task(options, project, root, report, before, answered, old, work), may_shrink)
        finally:
            shutil.rmtree(work)


def _update(task: _Task, may_shrink: bool) -> tuple[Path, dict[str, Any]] | None:
    documents = option_files(STAGES["snapshot"], task.options, task.project, task.root)["snapshot.documents"]
    new, old = _read_corpus(task, documents), task.old
    if 2 * len(new) < len(old) and not may_shrink:
        raise ValueError(
            f"{documents} has {len(new)} passages, less than half of the previous {len(old)}: nothing was "
            "published; check for missing documents, or accept with 'realmops update --may-shrink'"
        )
    files, before = new.manifest["files"], old.manifest["files"]
    if any(files[name] != before.get(name) for name in (TEXTS, PLACES)) or new.sources != old.sources:
        final = _publish(task, new)
        task.report.log(f"update: {final} is ready to serve")
    elif task.answered not in (None, task.before):  # a killed update has no answers yet
        final = task.before.snapshot.parent
    else:
        task.report.log(f"update: nothing to do, {task.before.snapshot} is up to date with {documents}")
        return None
    figures = {} if task.answered is None else _answer(task, task.answered.results, final)
    return final, artifacts.read_json(final / METRICS) | figures


def _publish(task: _Task, new: Snapshot) -> Path:
    bar = task.report.progress("words of passages", len(new))
    write_bm25(new.folder.with_name(bm25.FOLDER), new, bar, workers=task.options.snapshot.workers)
    number, model = task.before.number + 1, model_digest(pipeline_state(task.root))
    # An earlier update may have had this corpus, with this model or another: its folder is kept.
    final = task.root / UPDATES / artifacts.digest_of([model, number, new.corpus_hash])[:12]
    with artifacts.atomic_folder(final, UPDATE) as out:
        shutil.move(new.folder.parent, out / "snapshot")
        new = Snapshot.open(out / "snapshot" / "corpus", verify=False)
        artifacts.write_json(out / METRICS, _embed(task, new, out))
        artifacts.write_manifest(out, UPDATE, number=number, model=model, corpus_hash=new.corpus_hash)
    return final


def _checked_states(options: Options, project: Path, root: Path) -> tuple[CorpusState, CorpusState | None]:
    for name in ("snapshot", *(["evaluate"] if options.questions.test else []), "finetune"):
        manifest = artifacts.read_manifest(root / STAGES[name].folder, name)
    tuning = parse_sections((str(root / STAGES["finetune"].folder), manifest["sections"])).finetune
    if not tuning.reads_passages:
        raise ValueError(
            f"finetune.reader is {tuning.reader}, which reads no passages of a new corpus; fine-tune with another"
        )
    known_states = states(root)
    before = known_states[-1]
    if not options.questions.test:
        return before, None
    answered = next(state for state in reversed(known_states) if (state.results / PREDICTIONS).is_file())
    if answered.number:
        artifacts.read_manifest(answered.results, ANSWERS)
    path = option_files(STAGES["evaluate"], options, project, root)["questions.test"]
    questions = read_questions([path])
    common_languages = Snapshot.open(answered.snapshot / "corpus", verify=False).common_languages
    now = {question.asked: question.answer_rule for question in assign_languages(questions, common_languages)}
    before_rules = {p.asked: p.answer_rule for p in read_predictions(answered.results / PREDICTIONS)}
    if now != before_rules:
        raise ValueError(
            f"questions.test is {path} with {len(now)} questions, but {answered.results} answers {len(before_rules)} "
            "others; repeat the --set, --preset or --params of the training, or evaluate on these first"
        )
    return before, answered


def _read_corpus(task: _Task, documents: Path) -> Snapshot:
    old, final = task.old, task.work / "snapshot" / "corpus"
    options = task.options.snapshot
    files = list_sources(documents, options.format, find_data(options.ocr))
    final.mkdir(parents=True)
    manifest = write_snapshot(
        files,
        final,
        vocabulary=old.vocabulary,
        tokenizer=old.tokenizer_json,
        broken_share=options.broken_share,
        workers=options.workers,
        progress=task.report.progress("passages", sum(source.size for source in files), "B"),
        earlier=old.folder,
        **{**old.manifest["settings"], "casing": old.casing},
    )
    warn_of_rejects(task.report, "corpus", manifest, final, f"{task.root / UPDATES}/*/snapshot/corpus/{REJECTS}")
    warn_of_omitted(task.report, "corpus", manifest, f"snapshot/corpus/{SOURCES} of the update")
    artifacts.write_json(final.parent / METRICS, {"vocabulary": len(old.vocabulary), **snapshot_counts(manifest)})
    return Snapshot.open(final)


def _embed(task: _Task, new: Snapshot, out: Path) -> dict[str, Any]:
    """Write the model with the new index, embedding only new passages; return counts by change, and seconds."""
    before, old = task.before.finetune, task.old
    run = task.options.run
    configure_process(run.threads)
    folder = out / "finetune"
    model = pipeline_state(task.root).finetune  # not of an earlier update, whose calibration may be old
    others = shutil.ignore_patterns(INDEX, artifacts.MANIFEST)
    shutil.copytree(model, folder, copy_function=artifacts.link_or_copy, ignore=others)
    row = new.match_passages(old)
    new_rows = np.flatnonzero(row < 0)
    documents = set(old.column("document_id"))
    in_old_documents = sum(document in documents for (document,) in new.rows(new_rows, "document_id"))
    started = time.monotonic()
    if (before / INDEX).is_file():  # else the retriever is BM25
        retriever = load_retriever(folder, new.vocabulary_hash)
        device, dtype = device_and_dtype(run, retriever)
        bar = task.report.progress("embeddings", len(new_rows))
        embedding_PE = embed_changed(retriever.to(device), new, dtype, row, load_index(before, old), bar)
        save_index(folder / INDEX, embedding_PE, new.corpus_hash, indexed_tower(before))
    seconds = time.monotonic() - started
    return {
        "passages": len(new),
        "passages_unchanged": len(new) - len(new_rows),
        "passages_changed": in_old_documents,
        "passages_new": len(new_rows) - in_old_documents,
        "passages_removed": len(old) - (len(new) - len(new_rows)),
        "seconds_embedding": round(seconds, 2),
    }


def _answer(task: _Task, before: Path, final: Path) -> dict[str, Any]:
    stage = STAGES["evaluate"]
    inputs = {"snapshot": final / "snapshot", "finetune": final / "finetune"}
    inputs |= option_files(stage, task.options, task.project, task.root)
    with artifacts.atomic_folder(final / RESULTS, ANSWERS) as results:
        with Journal(task.work / JOURNAL, stage.name) as journal:
            sections = stage_options(stage, task.options)
            figures = evaluate.run(Job(sections, inputs, results, task.work, journal, task.report, task.work / "offer"))
        changes = changed_answers(read_predictions(before / PREDICTIONS), read_predictions(results / PREDICTIONS))
        lines = b"".join(artifacts.canonical_json(change) + b"\n" for change in changes)
        (results / Path(CHANGES).name).write_bytes(lines)
        earlier = artifacts.read_json(before / METRICS)
        compared = {
            "answers_changed": len(changes),
            **{f"{name}_before": earlier[name] for name in COMPARED if name in figures and name in earlier},
        }
        artifacts.write_json(results / METRICS, {**figures, **compared})
        artifacts.write_manifest(results, ANSWERS)
    return {name: figures[name] for name in ("questions", *COMPARED) if name in figures} | compared


def changed_answers(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return question, references, answer and evidence of each answer of both whose text changed (``text_key``)."""
    old_predictions = {prediction.asked: prediction for prediction in before}
    changes = []
    for new in after:
        old = old_predictions.get(new.asked)
        if old and text_key(new.prediction) != text_key(old.prediction):
            question = {"id": new.question_id, "question": new.question, "answers": list(new.answers)}
            changes.append({**question, "before": _side(old), "after": _side(new)})
    return changes


def _side(prediction: Prediction) -> dict[str, Any]:
    answer = {"answer": prediction.prediction, "right": prediction.em, "evidence": prediction.evidence}
    rank = prediction.evidence_rank
    passage = (prediction.titles[rank], prediction.passage_ids[rank]) if rank >= 0 else ("", "")
    return answer | dict(zip(("title", "passage_id"), passage, strict=True))


def changes_table(folder: Path, limit: int = _SHOWN) -> FigureTable:
    rows = []
    with open(folder / CHANGES, "rb") as file:
        for change in map(json.loads, itertools.islice(file, limit)):
            before, after = change["before"], change["after"]
            answers = (f"{side['answer'] or '(none)'}{' ✓' if side['right'] else ''}" for side in (before, after))
            evidence = preview(f"{after['title']}: {after['evidence']}", _EVIDENCE_CHARACTERS)
            rows.append((change["question"], *answers, evidence))
    title = f"Answers that changed (the first {len(rows)}; all: {folder / CHANGES})"
    return FigureTable(title, ("question", "before", "after", "evidence after"), [rows], are_numbers=False)
