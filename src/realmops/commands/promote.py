"""``realmops promote``: a finished run becomes the champion of MLflow's model registry, or it is said why not.

The files that answer questions are kept under a name of their own (hard links, where the disk knows them), so that
the next training does not take them from under the registered model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.artifacts import WORK
from realmops.baselines.rankers import BY_WORDS
from realmops.bert import device_and_dtype, tune_process
from realmops.commands.explain.trained import tuned_steps
from realmops.config import CLOSED_BOOK, Tracking, parse_section
from realmops.corpus.answers import normal_form
from realmops.corpus.questions import read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.compare import compare, sentence
from realmops.evaluate.openqa import em_rules
from realmops.evaluate.predictions import PREDICTIONS
from realmops.evaluate.tuned import open_tuned
from realmops.index import lexical
from realmops.model.files import is_hybrid
from realmops.stages import JOURNAL, METRICS, STAGES, fingerprint
from realmops.stages.runner import alone, inputs_of
from realmops.tracking.registry import ModelVersion, Registry
from realmops.tracking.spool import sent_run
from realmops.tracking.stage_runs import tracking_folder
from realmops.train.finetune import Answer, OpenQa, Span

KIND = "promoted"
FOLDER = "promoted"
CORPUS = "corpus"
FINETUNE = "finetune"
DIGEST_TAG = "realmops.digest"
EVALUATION_TAG = "realmops.evaluation_digest"
PREDICTIONS_TAG = "realmops.predictions_sha256"
CORPUS_TAG = "realmops.corpus_hash"
QUESTIONS_TAG = "realmops.questions"
STEPS_TAG = "realmops.weights_step"
RULE_TAG = "realmops.em_rule"
SHOWN = ("ece", "precision_at_30", "answered", "answered_precision")  # tags beside EM: what its confidence is worth
COPIED_TAG = "realmops.copied"  # of versions whose files lie in MLflow's artifacts
_TEXT, _NUMBER = {"type": "string", "required": True}, {"type": "double", "required": True}
# What goes in and comes out, in MLflow's form; ``reply`` gives the columns of the outputs.
SIGNATURE = {
    "inputs": [_TEXT],
    "outputs": [
        {"name": "question", **_TEXT},
        {"name": "answer", **_TEXT},
        {"name": "score", **_NUMBER, "required": False},
        {"name": "passage_id", **_TEXT},
        {"name": "title", **_TEXT},
        {"name": "evidence", **_TEXT},
        {
            "name": "citations",
            "type": "array",
            "required": True,
            "items": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(("uri", "document_id", "passage_id", "title", "quote"), _TEXT),
                    **{key: {"type": "long", "required": False} for key in ("start", "end")},
                },
            },
        },
        {
            "name": "passages",
            "type": "array",
            "required": True,
            "items": {"type": "object", "properties": {"passage_id": _TEXT, "title": _TEXT, "p_z": _NUMBER}},
        },
    ],
}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: what it answers with, and what its answers are worth.

    ``evaluation`` is the digest of what makes two results comparable: the test questions with their answers, and the
    rules by which an answer is right. The corpus does not count: a better one is a fair way to win, so it is shown.
    """

    results: Path
    files: Mapping[str, Path]  # by their names in the folder of a promoted model
    digest: str  # of the files' content and the sections
    predictions: str  # sha256
    evaluation: str
    rule: str
    corpus_hash: str
    sections: Mapping[str, Any]
    metrics: Mapping[str, Any]
    question: str  # the first
    steps: int | None  # of fine-tuning; None where the model was imported

    def __str__(self) -> str:
        return (
            f"EM {self.metrics['em']:.3f} by {self.rule} on {self.metrics['questions']} questions "
            f"(evaluation {self.evaluation[:12]}), corpus {self.corpus_hash[:12]}"
        )

    def tags(self, copy: bool) -> dict[str, str]:
        """What the registry says about it."""
        return {
            **({COPIED_TAG: "true"} if copy else {}),
            DIGEST_TAG: self.digest,
            EVALUATION_TAG: self.evaluation,
            PREDICTIONS_TAG: self.predictions,
            CORPUS_TAG: self.corpus_hash,
            "realmops.em": f"{self.metrics['em']:.4f}",
            RULE_TAG: self.rule,
            QUESTIONS_TAG: str(self.metrics["questions"]),
            **({} if self.steps is None else {STEPS_TAG: str(self.steps)}),
            **{f"realmops.{name}": f"{self.metrics[name]:.4f}" for name in SHOWN if name in self.metrics},
        }


@dataclass(frozen=True)
class Promotion:
    """Whether the run is the champion now, and why or why not; by how much its EM is higher, where they compare."""

    champion: bool
    message: str
    difference: float | None = None


def promote(
    values: Mapping[str, Mapping[str, Any]], *, project: Path, root: Path, name: str, margin: float, copy: bool
) -> Promotion:
    """Make the run under ``root`` the champion of the registered model ``name`` if it is better than the present one.

    Better means: on the same questions by the same rules, EM higher by at least ``margin``, and an interval of the
    difference (paired bootstrap) above 0. The first run needs no comparison. A call that was stopped between
    registration and alias goes on there.

    Args:
        copy: put all files into the model's artifacts instead of their paths.

    Raises ValueError for a margin that is no share, when the run is not finished or was changed, when tracking is off,
    and for a champion that this command did not register; ConnectionError when MLflow fails.
    """
    if not 0 <= margin <= 1:
        raise ValueError(f"margin is {margin}, a share from 0 to 1 is wanted")
    options: Tracking = parse_section("tracking", values["tracking"])
    if not options.enabled:
        raise ValueError(
            "tracking.enabled is false, and the registry is MLflow's: set tracking.enabled=true, and for a server "
            "MLFLOW_TRACKING_URI"
        )
    with alone(root / WORK, "promote"):
        run = read_run(project, root)
        registry = Registry(name, tracking_folder(root), options.experiment)
        champion = registry.champion()
        wanted = {DIGEST_TAG: run.digest, **({COPIED_TAG: "true"} if copy else {})}
        if champion is not None and wanted.items() <= champion.tags.items():
            return Promotion(True, f"{champion.uri} is the champion already: {run}")
        reason, difference = "there was none before", None
        if champion is not None and champion.tags.get(DIGEST_TAG) == run.digest:
            reason = f"before, {champion.uri} was the same without copies of its files"
        elif champion is not None:
            better, figures, difference = _against(champion, run, registry, margin)
            if not better:
                return Promotion(False, f"not promoted, {champion.uri} stays the champion: {figures}", difference)
            reason = f"before, it was {champion.uri}. {figures}"
        with _gathered(run, root, copy) as folder:
            version = registry.find(wanted) or _register(run, registry, root, folder, copy)
            if registry.champion() != champion:
                return Promotion(
                    False, f"not promoted: the champion of {name} changed meanwhile; run the command again"
                )
            registry.crown(version, run.question)
        return Promotion(True, f"{version.uri} is the champion: {run}; {reason}", difference)


def read_run(project: Path, root: Path) -> FinishedRun:
    """The finished run under a root; ValueError when its results are not those of its models, corpus and questions."""
    stage = STAGES["evaluate"]
    results = root / stage.folder
    manifest = artifacts.read_manifest(results, stage.name)
    sections = manifest["sections"]
    inputs = inputs_of(stage, sections, project, root)
    if fingerprint(stage, sections, inputs) != manifest["fingerprint"]:
        raise ValueError(
            f"{results} was made from other models, another corpus or other question files than those that are there "
            "now; run 'realmops run evaluate' first"
        )
    reader = sections["finetune"]["reader"]
    if reader in CLOSED_BOOK:
        raise ValueError(f"{results}: finetune.reader is {reader}, which has no evidence; promote a model that reads")
    questions = read_questions([inputs["questions.test"]], format=sections["questions"]["format"])
    corpus, tuned = (artifacts.read_json(inputs[name] / artifacts.MANIFEST)["files"] for name in ("snapshot", FINETUNE))
    by_words = sections["finetune"]["retriever"] in BY_WORDS or is_hybrid(inputs[FINETUNE])
    read = (CORPUS, lexical.FOLDER) if by_words else (CORPUS,)
    entries = {name: (inputs["snapshot"] / name, e) for name, e in corpus.items() if name.split("/")[0] in read}
    entries |= {
        f"{FINETUNE}/{name}": (inputs[FINETUNE] / name, entry)
        for name, entry in tuned.items()
        if name not in (JOURNAL, METRICS)
    }
    entries[PREDICTIONS] = (results / PREDICTIONS, manifest["files"][PREDICTIONS])
    rule = em_rules(questions)[0]
    used = {name: sections[name] for name in ("run", "finetune")}
    asked = sorted([q.id, q.question, sorted(q.answers)] for q in questions)
    return FinishedRun(
        results=results,
        files={name: path for name, (path, _) in entries.items()},
        digest=artifacts.digest_of([{name: entry["sha256"] for name, (_, entry) in entries.items()}, used]),
        predictions=manifest["files"][PREDICTIONS]["sha256"],
        evaluation=artifacts.digest_of({"questions": asked, "rules": [rule, questions[0].match_rule]}),
        rule=rule,
        corpus_hash=artifacts.read_json(inputs["snapshot"] / CORPUS / artifacts.MANIFEST)["corpus_hash"],
        sections=used,
        metrics=artifacts.read_json(results / METRICS),
        question=questions[0].question,
        steps=tuned_steps(root),
    )


def _against(
    champion: ModelVersion, run: FinishedRun, registry: Registry, margin: float
) -> tuple[bool, str, float | None]:
    """Whether the run is better, the figures, and the difference where the questions are the same."""
    theirs, ours = champion.tags, run.tags(copy=False)
    if EVALUATION_TAG not in theirs:
        raise ValueError(
            f"{champion.uri} has the alias champion and was not registered by 'realmops promote': choose another --name"
        )
    if theirs[EVALUATION_TAG] != run.evaluation:
        sides = [f"evaluation {t[EVALUATION_TAG][:12]}: {t[QUESTIONS_TAG]} by {t[RULE_TAG]}" for t in (theirs, ours)]
        found = f"it was measured on other questions ({sides[0]}) than {run.results} ({sides[1]})"
        return False, f"{found}; evaluate both on the same ones", None
    with tempfile.TemporaryDirectory() as folder:
        stored = registry.fetch(champion, PREDICTIONS, Path(folder))
        if artifacts.sha256_file(stored) != theirs[PREDICTIONS_TAG]:
            raise ValueError(
                f"{champion.uri}: its {PREDICTIONS} was changed since it was registered (sha256 is not "
                f"{theirs[PREDICTIONS_TAG]}); do not trust it: take its alias away, or restore the file"
            )
        em, _ = compare(run.results, Path(folder), seed=0)
    figures = (
        f"{sentence(em)}. Wanted are a difference of at least {margin:+.3f} and an interval above 0. "
        f"Corpus {run.corpus_hash[:12]} against {theirs[CORPUS_TAG][:12]}"
    )
    return em.difference.mean >= margin and em.difference.low > 0, figures, em.difference.mean


def _register(run: FinishedRun, registry: Registry, root: Path, folder: Path, copy: bool) -> ModelVersion:
    copied = [artifacts.MANIFEST, PREDICTIONS]
    copied += [name for name in (CORPUS, lexical.FOLDER, FINETUNE) if copy and (folder / name).is_dir()]
    return registry.register(
        Path(__file__).with_name("pyfunc.py"),
        {name: folder / name for name in copied},
        config={} if copy else {"folder": str(folder)},
        signature=SIGNATURE,
        question=run.question,
        tags=run.tags(copy),
        run_id=sent_run(tracking_folder(root), STAGES["evaluate"].name, run.metrics),
    )


@contextmanager
def _gathered(run: FinishedRun, root: Path, copy: bool) -> Iterator[Path]:
    """A folder with the run's files and a manifest over them: to stay, or to be copied from."""
    if copy:
        with tempfile.TemporaryDirectory(dir=root / WORK) as folder:
            _gather(run, Path(folder))
            yield Path(folder).absolute()
        return
    final = (root / FOLDER / run.digest[:12]).absolute()
    with artifacts.atomic_folder(final) as folder:
        _gather(run, folder)
    yield final


def _gather(run: FinishedRun, folder: Path) -> None:
    for name, path in run.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        artifacts.link_or_copy(path, folder / name)
    artifacts.write_manifest(folder, KIND, digest=run.digest, sections=run.sections)


# What the registered model, pyfunc.py, stands on.


def open_promoted(folder: Path, registered: Path, kind: type[OpenQa]) -> OpenQa:
    """A promoted model, ready on its device.

    Args:
        folder: where its files lie.
        registered: the manifest that the registry has of them.
        kind: the class of the model.

    Raises ValueError that names the file when one is missing or is not what was registered.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not there: the model's files were removed, or lie on another machine; name their folder with "
            "model_config={'folder': ...}, or register it by 'realmops promote --copy'"
        )
    manifest = artifacts.read_manifest(folder, KIND)
    if artifacts.sha256_file(folder / artifacts.MANIFEST) != artifacts.sha256_file(registered):
        raise ValueError(
            f"{folder / artifacts.MANIFEST} is not the registered one, {registered}: the folder holds another model"
        )
    place = str(folder / artifacts.MANIFEST)
    run = parse_section("run", manifest["sections"]["run"], place)
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    options = parse_section("finetune", manifest["sections"]["finetune"], place)
    snapshot = Snapshot.open(folder / CORPUS, verify=False)
    return open_tuned(folder / FINETUNE, options, snapshot, device, dtype, kind)


def reply(question: str, answer: Answer, snapshot: Snapshot) -> dict[str, Any]:
    """An answer with its evidence and where that stands, as JSON; without a span to choose it has no score.

    ``citations`` are the answer itself first, then the same answer in other passages that were read, best first.
    ``start`` and ``end``, characters of the document's text as it was read, are None for a corpus of a version before.
    """
    best = answer.best
    spans = [] if best is None else [best, *same_answers(answer)]
    return {
        "question": question,
        "answer": answer.text,
        "score": best.score if best else None,
        "passage_id": snapshot.passage_id(best.passage) if best else "",
        "title": snapshot.title(best.passage) if best else "",
        "evidence": snapshot.text(best.passage) if best else "",
        "citations": [cited(snapshot, span.passage, span.characters) for span in spans],
        "passages": [
            {"passage_id": snapshot.passage_id(p), "title": snapshot.title(p), "p_z": math.exp(log_p)}
            for p, log_p in zip(answer.passages, answer.log_prior, strict=True)
        ],
    }


def same_answers(answer: Answer) -> list[Span]:
    """The best spans of other passages that have the answer's normal form, best first."""
    form = normal_form(answer.text)
    others = [span for span in answer.best_of_passage if span and answer.best and span.passage != answer.best.passage]
    return sorted((span for span in others if normal_form(span.text) == form), key=lambda span: -span.score)


def cited(snapshot: Snapshot, passage: int, characters: tuple[int, int]) -> dict[str, Any]:
    """Where a part of a passage stands: document, passage, and characters of the document's text as it was read."""
    first = snapshot.start(passage) if snapshot.has_places else None
    start, end = characters
    return {
        "uri": snapshot.uri(passage) if snapshot.has_places else "",
        "document_id": snapshot.document_id(passage),
        "passage_id": snapshot.passage_id(passage),
        "title": snapshot.title(passage),
        "start": None if first is None else first + start,
        "end": None if first is None else first + end,
        "quote": snapshot.text(passage)[start:end],
    }
