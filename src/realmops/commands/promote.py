"""``realmops promote``: register a finished run as champion in MLflow's model registry, if it is better.

The files for answering are kept in a separate folder, so that the next training does not overwrite them.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.artifacts import PROMOTED, WORK_FOLDER
from realmops.commands.open_model import STEPS_TAG
from realmops.config import parse_sections
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.compare import SAME_ORIGIN, compare_runs, deciding_metric, format_comparison, question_origin
from realmops.evaluate.exact_match import em_rules
from realmops.evaluate.predictions import PREDICTIONS
from realmops.opening import CORPUS, FINETUNE, tuned_steps
from realmops.options import Options
from realmops.questions.question_sets import assign_languages, read_questions
from realmops.search import bm25
from realmops.stages import JOURNAL, METRICS, STAGES, fingerprint
from realmops.stages.runner import stage_inputs, stage_lock
from realmops.tracking.registry import COPIED_TAG, DIGEST_TAG, ModelVersion, Registry
from realmops.tracking.runs import tracking_folder
from realmops.tracking.sender import find_sent_run

EVALUATION_TAG = "realmops.evaluation_digest"
PREDICTIONS_TAG = "realmops.predictions_sha256"
CORPUS_TAG = "realmops.corpus_hash"
QUESTIONS_TAG = "realmops.questions"
ORIGIN_TAG = "realmops.question_origin"
RULE_TAG = "realmops.em_rule"
SHOWN = ("ece", "precision_at_30", "answered", "answered_precision")  # calibration metrics shown as tags


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: the files it answers with, and its evaluation."""

    results: Path
    files: Mapping[str, Path]  # by path inside the promoted model's folder
    digest: str  # of the files' contents and the sections
    predictions: str  # sha256
    evaluation: str  # digest of what comparable results share: test questions, their answers, and the matching rules
    origin: str  # of the test questions: EM if some are of people, recall@5 if all were generated
    rule: str
    corpus_hash: str
    sections: Mapping[str, Any]
    metrics: Mapping[str, Any]
    question: str  # the first, as example input
    steps: int | None  # of fine-tuning; None for an imported model

    def __str__(self) -> str:
        generated, questions = self.metrics.get("generated_questions", 0), self.metrics["questions"]
        metric = deciding_metric(self.metrics)
        if metric == "em":
            measured = f"EM {self.metrics['em']:.3f} by {self.rule} on {questions - generated} questions"
        else:
            name = "nDCG@10" if metric == "ndcg_at_10" else "recall@5"
            kind = "generated questions" if generated == questions else "questions"
            measured = f"{name} {self.metrics[metric]:.3f} on {questions} {kind}"
        return f"{measured} (evaluation {self.evaluation[:12]}), corpus {self.corpus_hash[:12]}"

    def tags(self, copy: bool) -> dict[str, str]:
        measure = deciding_metric(self.metrics)
        return {
            **({COPIED_TAG: "true"} if copy else {}),
            DIGEST_TAG: self.digest,
            EVALUATION_TAG: self.evaluation,
            PREDICTIONS_TAG: self.predictions,
            CORPUS_TAG: self.corpus_hash,
            ORIGIN_TAG: self.origin,
            RULE_TAG: self.rule,
            QUESTIONS_TAG: str(self.metrics["questions"]),
            **({} if self.steps is None else {STEPS_TAG: str(self.steps)}),
            **{f"realmops.{name}": f"{self.metrics[name]:.4f}" for name in (measure, *SHOWN) if name in self.metrics},
        }


@dataclass(frozen=True)
class Promotion:
    """The result of a promotion: whether the run is champion, the reason, and the difference if comparable."""

    champion: bool
    message: str
    difference: float | None = None


def promote(options: Options, *, project: Path, root: Path, name: str, margin: float, copy: bool) -> Promotion:
    """Make a run the champion of the registered model ``name`` if it is better than the current champion.

    Better means: on the same questions by the same rules, EM is higher by at least ``margin``, and the confidence
    interval of the difference (paired bootstrap) is above 0. If all test questions were generated from the corpus, it
    is recall@5 instead of EM, and nDCG@10 if they have relevance judgements alone. ``copy`` stores all files in MLflow
    too.
    """
    if not 0 <= margin <= 1:
        raise ValueError(f"margin is {margin}; expected a number from 0 to 1")
    if not options.tracking.enabled:
        raise ValueError("tracking.enabled is false, but promotion needs MLflow's registry; set tracking.enabled=true")
    with stage_lock(root / WORK_FOLDER, "promote"):
        run = read_run(project, root)
        registry = Registry(name, tracking_folder(root), options.tracking.experiment)
        champion = registry.champion()
        tags = {DIGEST_TAG: run.digest, **({COPIED_TAG: "true"} if copy else {})}
        if champion is not None and tags.items() <= champion.tags.items():
            return Promotion(True, f"{champion.uri} is already the champion: {run}")
        reason, difference = "it is the first champion", None
        if champion is not None and champion.tags.get(DIGEST_TAG) == run.digest:
            reason = f"the previous champion {champion.uri} was the same run without copies of its files"
        elif champion is not None:
            better, figures, difference = _compare_to_champion(champion, run, registry, margin)
            if not better:
                return Promotion(False, f"not promoted, {champion.uri} remains champion: {figures}", difference)
            reason = f"the previous champion was {champion.uri}. {figures}"
        version = _register(run, registry, root, copy)
        if not registry.make_champion(version, run.question, champion):
            return Promotion(
                False, f"not promoted: the champion of {name} changed during this call; run the command again"
            )
        return Promotion(True, f"{version.uri} is the champion: {run}; {reason}", difference)


def read_run(project: Path, root: Path) -> FinishedRun:
    """Read the finished run in ``root``; ValueError if it changed since the evaluation, or there is no reader."""
    stage = STAGES["evaluate"]
    results = root / stage.folder
    manifest = artifacts.read_manifest(results, stage.name)
    options = parse_sections((str(results), manifest["sections"]))
    inputs = stage_inputs(stage, options, project, root)
    if fingerprint(stage, options, inputs) != manifest["fingerprint"]:
        raise ValueError(
            f"{results}: models, corpus or question files have changed since; run 'realmops run evaluate' first"
        )
    if not options.finetune.reads_passages:
        raise ValueError(
            f"{results}: finetune.reader is {options.finetune.reader}, which reads no passages; promote another run"
        )
    questions = read_questions([inputs["questions.test"]])
    corpus, tuned = (artifacts.read_json(inputs[name] / artifacts.MANIFEST)["files"] for name in ("snapshot", FINETUNE))
    folders = (CORPUS, bm25.FOLDER)  # every model supports search by BM25
    entries = {name: (inputs["snapshot"] / name, e) for name, e in corpus.items() if name.split("/")[0] in folders}
    model = {name: entry for name, entry in tuned.items() if name not in (JOURNAL, METRICS)}
    entries |= {f"{FINETUNE}/{name}": (inputs[FINETUNE] / name, entry) for name, entry in model.items()}
    entries[PREDICTIONS] = (results / PREDICTIONS, manifest["files"][PREDICTIONS])
    rule, metrics = em_rules(questions)[0], artifacts.read_json(results / METRICS)
    model_sections = options.model_dump(include={"run", "finetune"})
    languages = Snapshot.open(inputs["snapshot"] / CORPUS, verify=False).common_languages
    evaluated = sorted(
        [q.id, q.question, sorted(q.answers), sorted(q.not_in), sorted(q.relevant), q.answer_rule]
        for q in assign_languages(questions, languages)
    )
    return FinishedRun(
        results=results,
        files={name: path for name, (path, _) in entries.items()},
        digest=artifacts.digest_of([{name: entry["sha256"] for name, (_, entry) in entries.items()}, model_sections]),
        predictions=manifest["files"][PREDICTIONS]["sha256"],
        evaluation=artifacts.digest_of({"questions": evaluated, "rules": [rule, questions[0].match_rule]}),
        origin=question_origin([question.is_generated for question in questions], has_em="em" in metrics),
        rule=rule,
        corpus_hash=artifacts.read_json(inputs["snapshot"] / CORPUS / artifacts.MANIFEST)["corpus_hash"],
        sections=model_sections,
        metrics=metrics,
        question=questions[0].question,
        steps=tuned_steps(root),
    )


def _compare_to_champion(
    champion: ModelVersion, run: FinishedRun, registry: Registry, margin: float
) -> tuple[bool, str, float | None]:
    champion_tags, run_tags = champion.tags, run.tags(copy=False)
    if EVALUATION_TAG not in champion_tags:
        raise ValueError(
            f"{champion.uri} has the alias champion but was not registered by 'realmops promote'; choose another --name"
        )
    if champion_tags[ORIGIN_TAG] != run.origin:
        raise ValueError(
            f"{champion.uri} was evaluated on {champion_tags[ORIGIN_TAG]} and {run.results} on {run.origin}; "
            f"{SAME_ORIGIN}, or choose another --name"
        )
    if champion_tags[EVALUATION_TAG] != run.evaluation:
        pair = (champion_tags, run_tags)
        sides = [f"evaluation {t[EVALUATION_TAG][:12]}: {t[QUESTIONS_TAG]} by {t[RULE_TAG]}" for t in pair]
        reason = f"it was evaluated on other questions or languages ({sides[0]}) than {run.results} ({sides[1]})"
        return False, f"{reason}; evaluate both on the same ones", None
    with tempfile.TemporaryDirectory() as folder:
        stored = registry.fetch(champion, f"artifacts/{PREDICTIONS}", Path(folder))
        if artifacts.sha256_file(stored) != champion_tags[PREDICTIONS_TAG]:
            raise ValueError(
                f"{champion.uri}: {PREDICTIONS} has changed since registration; restore it, or remove the alias"
            )
        deciding, *_ = compare_runs(run.results, Path(folder), seed=0)
    figures = (
        f"{format_comparison(deciding)}. Required: a difference of at least {margin:+.3f} and an interval above 0. "
        f"Corpus {run.corpus_hash[:12]} against {champion_tags[CORPUS_TAG][:12]}"
    )
    difference = deciding.difference
    return difference.mean >= margin and difference.low > 0, figures, difference.mean


def _register(run: FinishedRun, registry: Registry, root: Path, copy: bool) -> ModelVersion:
    folder = _link_files(run, root)
    uploaded = [artifacts.MANIFEST, PREDICTIONS]
    uploaded += [name for name in (CORPUS, bm25.FOLDER, FINETUNE) if copy and (folder / name).is_dir()]
    return registry.register(
        Path(__file__).with_name("pyfunc.py"),
        {name: folder / name for name in uploaded},
        config={} if copy else {"folder": str(folder)},
        question=run.question,
        tags=run.tags(copy),
        run_id=find_sent_run(tracking_folder(root), STAGES["evaluate"].name, run.metrics),
    )


def _link_files(run: FinishedRun, root: Path) -> Path:
    final = (root / PROMOTED / run.digest[:12]).absolute()
    with artifacts.atomic_folder(final, PROMOTED) as folder:
        for name, path in run.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            artifacts.link_or_copy(path, folder / name)
        artifacts.write_manifest(folder, PROMOTED, digest=run.digest, sections=run.sections, weights_step=run.steps)
    return final
