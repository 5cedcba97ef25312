"""A changed corpus under a trained model (appendix C of the paper): new passages are embedded, the others' embeddings
are taken over, the test questions are answered again, and nothing is trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from realmops import artifacts, tracking
from realmops.config import SnapshotOptions, parse_section
from realmops.corpus.answers import normal_form
from realmops.corpus.formats import sources
from realmops.corpus.questions import read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.evaluate.compare import PREDICTIONS
from realmops.evaluate.openqa import Prediction, read_predictions
from realmops.index import lexical
from realmops.index.lexical_writer import write_bm25
from realmops.model.files import READER, RETRIEVER, load_models
from realmops.stages import JOURNAL, METRICS, STAGES, Job, Report, content_of, evaluate, external_files, parse_sections
from realmops.stages.common import INDEX, embed_changed, load_index, prepare, save_index
from realmops.stages.runner import WORK, alone
from realmops.stages.snapshot import counts

if TYPE_CHECKING:
    from rich.table import Table

KIND = "update"
FOLDER = "updates"
CHANGES = "changed_answers.jsonl"
_HEAD = ("question", "before", "after", "evidence after")
_SHOWN = 10
_CUT = 60


@dataclass(frozen=True)
class Standing:
    """Where a corpus with its index and the answers over it lie: those of the pipeline or of an update."""

    snapshot: Path
    finetune: Path
    results: Path
    number: int


def update(
    values: Mapping[str, Mapping[str, Any]], *, project: Path, root: Path, report: Report
) -> tuple[Path, dict[str, Any]] | None:
    """Read ``snapshot.documents`` again; returns the folder updates/HASH that was written, and its metrics.

    None when the passages are those of before.

    The folder holds snapshot, fine-tuned model with the new index, results, and what became of each answer that
    is another one. Compared with the update before, or with the pipeline's own results; those stay as they are.
    Raises ValueError when a stage that it builds on has not run, and for a bad corpus.
    """
    with alone(root / WORK, KIND):
        return _update(values, project, root, report)


def _update(
    values: Mapping[str, Mapping[str, Any]], project: Path, root: Path, report: Report
) -> tuple[Path, dict[str, Any]] | None:
    for name in ("snapshot", "finetune", "evaluate"):
        made = artifacts.read_manifest(root / STAGES[name].folder, name)
    if made["sections"]["finetune"]["reader"] == "t5":
        raise ValueError(
            f"{root / STAGES['finetune'].folder} answers without reading (finetune.reader is t5): another corpus "
            "changes none of its answers; fine-tune a reader to use one"
        )
    before = standing(root)
    _refuse_other_questions(values, project, root, before)
    old = Snapshot.open(before.snapshot / "corpus")
    documents = external_files(STAGES["snapshot"], values, project, root)["snapshot.documents"]
    key = artifacts.digest_of([old.vocabulary_hash, old.manifest["settings"], str(documents), content_of(documents)])
    work = root / WORK / "work" / f"{KIND}-{key[:16]}"
    new = _read_corpus(values["snapshot"], documents, old, work, report)
    if new.corpus_hash == old.corpus_hash:
        shutil.rmtree(work)
        report.say(f"update: nothing to do, {before.snapshot} holds the passages of {documents}")
        return None
    _index_words(values["snapshot"], before, old, new, work, report)
    number = before.number + 1
    final = root / FOLDER / new.corpus_hash[:12]
    if final.exists():  # the corpus of an earlier update came back
        final = final.with_name(f"{final.name}-{number}")
    with artifacts.atomic_folder(final) as out:
        shutil.copytree(work / "snapshot", out / "snapshot", copy_function=artifacts.link_or_copy)
        metrics = _embed(values, before, old, new, out, report)
        metrics |= _answer(values, project, root, before, out, work, report)
        artifacts.write_json(out / METRICS, metrics)
        artifacts.write_manifest(out, KIND, number=number, model=_model(before), corpus_hash=new.corpus_hash)
    shutil.rmtree(work)
    return final, metrics


def of_pipeline(root: Path) -> Standing:
    """What the stages made, before any update."""
    snapshot, finetune, results = (root / STAGES[name].folder for name in ("snapshot", "finetune", "evaluate"))
    return Standing(snapshot, finetune, results, 0)


def before_and_after(root: Path) -> tuple[Standing, Standing]:
    """What the stages made, and the newest update of it; ValueError when the present model has none."""
    artifacts.read_manifest(root / STAGES["finetune"].folder, "finetune")
    newest = standing(root)
    if newest.number == 0:
        raise ValueError(f"{root / FOLDER} holds no update of the present model; run 'realmops update' first")
    return of_pipeline(root), newest


def _refuse_other_questions(
    values: Mapping[str, Mapping[str, Any]], project: Path, root: Path, before: Standing
) -> None:
    path = external_files(STAGES["evaluate"], values, project, root)["questions.test"]
    asked = {question.id for question in read_questions([path], format=values["questions"]["format"])}
    known = {prediction.question_id for prediction in read_predictions(before.results / PREDICTIONS)}
    if asked != known:
        raise ValueError(
            f"questions.test is {path} with {len(asked)} questions, and {before.results} answers {len(known)} others: "
            "repeat the --set, --preset or --params that the run was trained with, or evaluate it on these first"
        )


def standing(root: Path) -> Standing:
    """The newest update of the present model, or what the pipeline made."""
    newest = of_pipeline(root)
    model = _model(newest)
    for path in sorted((root / FOLDER).glob(f"[!.]*/{artifacts.MANIFEST}")):
        manifest = artifacts.read_manifest(path.parent, KIND)
        if manifest["model"] == model and manifest["number"] > newest.number:
            snapshot, finetune, results = (path.parent / name for name in ("snapshot", "finetune", "results"))
            newest = Standing(snapshot, finetune, results, manifest["number"])
    return newest


def _model(where: Standing) -> str:
    """The digest of the weights."""
    return artifacts.digest_of([artifacts.sha256_file(where.finetune / name) for name in (RETRIEVER, READER)])


def _read_corpus(section: Mapping[str, Any], documents: Path, old: Snapshot, work: Path, report: Report) -> Snapshot:
    """The snapshot of the documents as they are now, with vocabulary and settings of the old one."""
    final = work / "snapshot" / "corpus"
    figures = final.parent / METRICS
    if figures.is_file():
        with suppress(ValueError):  # killed while it was being removed
            return Snapshot.open(final)
    options: SnapshotOptions = parse_section("snapshot", section)
    found = sources(documents, options.format)
    try:
        with artifacts.atomic_folder(final) as stage:
            manifest = write_snapshot(
                found,
                stage,
                work=work / "growing",
                vocabulary=old.vocabulary,
                broken_share=options.broken_share,
                workers=options.workers,
                progress=report.progress("passages", sum(source.size for source in found), "B"),
                **{**old.manifest["settings"], "casing": old.casing},
            )
    except ValueError:
        shutil.rmtree(work)
        raise
    artifacts.write_json(figures, {"vocabulary": len(old.vocabulary), **counts(manifest)})
    shutil.rmtree(work / "growing")
    return Snapshot.open(final)


def _index_words(
    section: Mapping[str, Any], before: Standing, old: Snapshot, new: Snapshot, work: Path, report: Report
) -> None:
    """Write the BM25 index beside the new snapshot: only the words of new passages are counted."""
    folder = new.folder.with_name(lexical.FOLDER)
    with suppress(ValueError):  # not there, or killed while it was being removed
        lexical.Bm25.of(new, verify=True)
        return
    options: SnapshotOptions = parse_section("snapshot", section)
    there = (before.snapshot / lexical.FOLDER).is_dir()  # else made by a version before
    write_bm25(
        folder,
        new,
        report.progress("words of passages", len(new)),
        work=work / lexical.FOLDER,
        workers=options.workers,
        earlier=old if there else None,
    )
    shutil.rmtree(work / lexical.FOLDER)


def _embed(
    values: Mapping[str, Mapping[str, Any]], before: Standing, old: Snapshot, new: Snapshot, out: Path, report: Report
) -> dict[str, Any]:
    """Write the model with the new index; returns how many passages changed and what embedding them took."""
    device, dtype = prepare(parse_section("run", values["run"]))
    folder = out / "finetune"
    folder.mkdir()
    for path in sorted(before.finetune.iterdir()):
        if path.name not in (INDEX, artifacts.MANIFEST):
            artifacts.link_or_copy(path, folder / path.name)
    row = new.places_in(old)
    unknown = np.flatnonzero(row < 0)
    documents = set(old.column("document_id"))
    of_known_documents = sum(document in documents for (document,) in new.rows(unknown, "document_id"))
    started = time.monotonic()
    if (before.finetune / INDEX).is_file():  # else the retriever goes by words
        retriever = load_models(folder, new.vocabulary_hash)[0].to(device)
        bar = report.progress("embeddings", len(unknown))
        earlier = load_index(before.finetune, old)
        save_index(folder / INDEX, embed_changed(retriever, new, dtype, row, earlier, bar))
    seconds = time.monotonic() - started
    return {
        "passages": len(new),
        "passages_unchanged": len(new) - len(unknown),
        "passages_changed": of_known_documents,
        "passages_new": len(unknown) - of_known_documents,
        "passages_removed": len(old) - (len(new) - len(unknown)),
        "seconds_embedding": round(seconds, 2),
        "seconds_embedding_all_at_that_rate": round(seconds * len(new) / max(len(unknown), 1), 2),
    }


def _answer(
    values: Mapping[str, Mapping[str, Any]],
    project: Path,
    root: Path,
    before: Standing,
    out: Path,
    work: Path,
    report: Report,
) -> dict[str, Any]:
    """Run the stage ``evaluate`` on the new folders and write the answers that changed; returns figures of both."""
    stage = STAGES["evaluate"]
    inputs = {"snapshot": out / "snapshot", "finetune": out / "finetune"}
    inputs |= external_files(stage, values, project, root)
    results = out / "results"
    results.mkdir()
    with tracking.Journal(work / JOURNAL, stage.name) as journal:
        sections = parse_sections(stage, values)
        figures = evaluate.run(Job(sections, inputs, results, work, journal, report))
    artifacts.write_json(results / METRICS, figures)
    changes = changed_answers(read_predictions(before.results / PREDICTIONS), read_predictions(results / PREDICTIONS))
    lines = [artifacts.canonical_json(change) + b"\n" for change in changes]
    (out / CHANGES).write_bytes(b"".join(lines))
    earlier = artifacts.read_json(before.results / METRICS)
    return {
        "questions": figures["questions"],
        "answers_changed": len(changes),
        **{f"{name}_before": earlier[name] for name in ("em", "recall_at_5")},
        **{name: figures[name] for name in ("em", "recall_at_5")},
    }


def changed_answers(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Question, references, and answer and evidence before and after, where the answer's normal form changed.

    Questions that stand in only one of the two are left out.
    """
    known = {prediction.question_id: prediction for prediction in before}
    return [
        {
            "id": new.question_id,
            "question": new.question,
            "answers": list(new.answers),
            "before": _side(known[new.question_id]),
            "after": _side(new),
        }
        for new in after
        if new.question_id in known and normal_form(new.prediction) != normal_form(known[new.question_id].prediction)
    ]


def _side(prediction: Prediction) -> dict[str, Any]:
    rank = prediction.evidence_rank
    return {
        "answer": prediction.prediction,
        "right": prediction.em,
        "title": prediction.titles[rank] if rank >= 0 else "",
        "passage_id": prediction.passage_ids[rank] if rank >= 0 else "",
        "evidence": prediction.evidence,
    }


def changes_table(folder: Path) -> Table:
    """The first answers that changed, for rich's console."""
    from rich.table import Table
    from rich.text import Text

    rows = _shown_changes(folder, _SHOWN)
    table = Table(title=f"Answers that changed (the first {len(rows)}; all: {os.fspath(folder / CHANGES)})")
    for name in _HEAD:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))  # brackets in texts are no markup
    return table


def changes_markdown(folder: Path, limit: int) -> str:
    """The first answers that changed, as Markdown."""
    rows = _shown_changes(folder, limit)
    if not rows:
        return "No answer changed.\n"
    lines = [_HEAD, ("---",) * len(_HEAD), *([_as_text(cell) for cell in row] for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"Answers that changed (the first {len(rows)}; all: {_as_text(str(folder / CHANGES))})\n\n{table}"


def _as_text(cell: str) -> str:
    """A text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(cell.split()))


def _shown_changes(folder: Path, limit: int) -> list[tuple[str, ...]]:
    """The first answers that changed, as people read them: see ``_HEAD``."""
    with open(folder / CHANGES, "rb") as file:
        changes = [json.loads(line) for line, _ in zip(file, range(limit), strict=False)]
    rows = []
    for change in changes:
        sides = [
            f"{change[side]['answer'] or '(none)'}{' ✓' if change[side]['right'] else ''}"
            for side in ("before", "after")
        ]
        evidence = f"{change['after']['title']}: {change['after']['evidence']}"
        rows.append((change["question"], *sides, evidence if len(evidence) <= _CUT else f"{evidence[:_CUT]}…"))
    return rows
