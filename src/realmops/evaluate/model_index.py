"""Figures of a run as the model-index in the front matter of a model card on the Hugging Face hub."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult

from realmops.evaluate.ranking_measures import MEASURES
from realmops.evaluate.recall import SHOWN_AT
from realmops.questions.answer_matching import REGEX_RULES, WORD_RULES

OWN_DATA = "unknown"  # dataset type of questions that are on no hub, as sentence-transformers writes it
_RULES = {  # when a passage counts as relevant, by rule
    "token_boundary": "the words of an answer are in one of the first {k} passages",
    "regex_search": "an answer's expression matches one of the first {k} passages",
}
_ANSWERS = {"em": ("exact_match", "Exact match of the answers"), "f1": ("f1", "F1 of the answers")}

Metrics = Mapping[str, Any]


def retriever_results(dataset: str, metrics: Metrics, prefix: str) -> list[EvalResult]:
    """Return the figures of a retriever by the ``prefix`` of its metrics; empty if it was not measured."""
    generated = metrics.get("generated_questions", 0)
    if generated:
        dataset += f" ({generated} of {metrics['questions']} questions generated from the documents)"
    task = ("information-retrieval", "Information retrieval")
    judged = list(_judged(metrics, prefix))
    count = metrics["judged_questions"] if judged else metrics.get("questions", 0)
    return _results(task, dataset, count, judged or _recall(metrics, prefix))


def reader_results(dataset: str, metrics: Metrics, kind: str = OWN_DATA, split: str = "test") -> list[EvalResult]:
    """Return the figures of a reader; ``kind`` is the dataset's name on the hub, ``split`` the measured one."""
    task = ("question-answering", "Open-domain question answering")
    rows = [_row(metrics, key, *names) for key, names in _ANSWERS.items() if key in metrics]
    people = metrics.get("questions", 0) - metrics.get("generated_questions", 0)
    return _results(task, dataset, people, rows, kind, split)


def _recall(metrics: Metrics, prefix: str) -> Iterator[dict[str, Any]]:
    rule = next((rule for rule in (*WORD_RULES, *REGEX_RULES) if f"{prefix}recall_at_5_{rule}_low" in metrics), None)
    if rule is not None:
        for k in SHOWN_AT:
            key = f"{prefix}recall_at_{k}_{rule}"
            yield _row(metrics, key, f"recall_at_{k}", f"Recall@{k}: {_RULES[rule].format(k=k)}")


def _judged(metrics: Metrics, prefix: str) -> Iterator[dict[str, Any]]:
    for measure, name in MEASURES.items():
        if prefix + measure in metrics:
            yield _row(metrics, prefix + measure, measure.removesuffix("_judged"), f"{name} of documents")


def _row(metrics: Metrics, key: str, kind: str, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"metric_type": kind, "metric_name": name, "metric_value": round(metrics[key], 4)}
    interval = [round(metrics[f"{key}_{end}"], 4) for end in ("low", "high") if f"{key}_{end}" in metrics]
    return row | ({"metric_args": {"interval_95": interval}} if interval else {})


def _results(
    task: Sequence[str], dataset: str, questions: int, rows: Any, kind: str = OWN_DATA, split: str = "test"
) -> list[EvalResult]:
    about: dict[str, Any] = {"task_type": task[0], "task_name": task[1], "dataset_type": kind, "dataset_name": dataset}
    return [EvalResult(**about, dataset_split=split, dataset_args={"questions": questions}, **row) for row in rows]
