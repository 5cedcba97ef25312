"""``realmops promote``: a finished run becomes the champion of MLflow's model registry, or it is said why not.

The files that answer questions are kept under a name of their own (hard links, where the disk knows them), so that
the next training does not take them from under the registered model.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.artifacts import WORK
from realmops.commands.open_model import COPIED_TAG, CORPUS, DIGEST_TAG, FINETUNE, PROMOTED, STEPS_TAG
from realmops.config import CLOSED_BOOK, Tracking, Values, parse_section
from realmops.corpus.question_sets import EXPRESSIONS, in_languages, read_questions
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.compare import compare, sentence
from realmops.evaluate.exact_match import em_rules
from realmops.evaluate.predictions import PREDICTIONS
from realmops.search import bm25
from realmops.stages import JOURNAL, METRICS, STAGES, fingerprint
from realmops.stages.runner import alone, inputs_of
from realmops.stages.trained import tuned_steps
from realmops.text.languages import ENGLISH
from realmops.tracking.registry import ModelVersion, Registry
from realmops.tracking.runs import tracking_folder
from realmops.tracking.sender import sent_run

EVALUATION_TAG = "realmops.evaluation_digest"
PREDICTIONS_TAG = "realmops.predictions_sha256"
CORPUS_TAG = "realmops.corpus_hash"
QUESTIONS_TAG = "realmops.questions"
RULE_TAG = "realmops.em_rule"
SHOWN = ("ece", "precision_at_30", "answered", "answered_precision")  # tags beside EM: what its confidence is worth

# The record of ``answering.record`` in MLflow's types; a figure with "?" may be missing, a list holds such objects.
_PLACE = dict.fromkeys(("uri", "document_id", "passage_id", "title"), "string")
_PLACE |= {"start": "long?", "end": "long?", "page": "long?"}
_WEIGHT = {"p_z": "double", "p_z_given_y": "double?"}
_RECORD = {
    "question": "string",
    "answer": "string",
    "probability": "double",
    "p_y": "double",
    "threshold": "double?",
    "abstained": "boolean",
    "citations": [_PLACE | _WEIGHT | {"quote": "string"}],
    "quote": _PLACE | {"quote": "string"},
    "passages": [_PLACE | _WEIGHT | {"text": "string", "span": "string?", "score": "double?"}],
    "model": {"version": "string", "snapshot": "string", "weights_step": "long?", "index_generation": "long"},
}


def _in_form(kind: Any) -> dict[str, Any]:
    """A type as MLflow's signatures have it."""
    if isinstance(kind, str):
        return {"type": kind.removesuffix("?"), "required": not kind.endswith("?")}
    if isinstance(kind, list):
        items = {name: value for name, value in _in_form(kind[0]).items() if name != "required"}
        return {"type": "array", "required": True, "items": items}
    return {"type": "object", "required": True, "properties": {name: _in_form(of) for name, of in kind.items()}}


SIGNATURE = {
    "inputs": [_in_form("string")],
    "outputs": [{"name": name, **_in_form(kind)} for name, kind in _RECORD.items()],
}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: what it answers with, and what its answers are worth.

    ``evaluation`` is the digest of what makes two results comparable: the test questions with their answers and
    languages, and the rules by which an answer is right. The corpus does not count: a better one is a fair way to win,
    so it is shown.
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


def promote(values: Values, *, project: Path, root: Path, name: str, margin: float, copy: bool) -> Promotion:
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
            version = _registered(registry, wanted, copy) or _register(run, registry, root, folder, copy)
            if not registry.crown(version, run.question, champion):
                return Promotion(
                    False, f"not promoted: the champion of {name} changed meanwhile; run the command again"
                )
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
    read = (CORPUS, bm25.FOLDER)  # every model is searched by words, too
    entries = {name: (inputs["snapshot"] / name, e) for name, e in corpus.items() if name.split("/")[0] in read}
    entries |= {
        f"{FINETUNE}/{name}": (inputs[FINETUNE] / name, entry)
        for name, entry in tuned.items()
        if name not in (JOURNAL, METRICS)
    }
    entries[PREDICTIONS] = (results / PREDICTIONS, manifest["files"][PREDICTIONS])
    rule = em_rules(questions)[0]
    used = {name: sections[name] for name in ("run", "finetune")}
    asked = sorted(
        [
            *(q.id, q.question, sorted(q.answers)),
            # What is not evidence of a question, and its language, are part of what is measured; most have neither.
            *([sorted(q.not_in)] if q.not_in else []),
            *([] if q.answer_rule in (ENGLISH, EXPRESSIONS) else [q.answer_rule]),
        ]
        for q in in_languages(questions, Snapshot.open(inputs["snapshot"] / CORPUS, verify=False).common_languages)
    )

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
        found = f"it was measured on other questions or in other languages ({sides[0]}) than {run.results} ({sides[1]})"
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


def _registered(registry: Registry, wanted: Mapping[str, str], copy: bool) -> ModelVersion | None:
    """A version with these tags that can still be loaded: its folder may be gone, when it was another root's."""
    found = registry.find(wanted)
    if found is None or copy or COPIED_TAG in found.tags or Path(registry.settings(found)["folder"]).is_dir():
        return found
    return None


def _register(run: FinishedRun, registry: Registry, root: Path, folder: Path, copy: bool) -> ModelVersion:
    copied = [artifacts.MANIFEST, PREDICTIONS]
    copied += [name for name in (CORPUS, bm25.FOLDER, FINETUNE) if copy and (folder / name).is_dir()]
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
    final = (root / PROMOTED / run.digest[:12]).absolute()
    with artifacts.atomic_folder(final) as folder:
        _gather(run, folder)
    yield final


def _gather(run: FinishedRun, folder: Path) -> None:
    for name, path in run.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        artifacts.link_or_copy(path, folder / name)
    artifacts.write_manifest(folder, PROMOTED, digest=run.digest, sections=run.sections, weights_step=run.steps)
