"""The model card of an export: README.md with the front matter of the Hugging Face hub."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from realmops import __version__, artifacts
from realmops.answering.confidence import OWN_QUESTIONS
from realmops.answering.opened_model import OpenedModel
from realmops.answering.opening import trained_sections
from realmops.commands.report import read_metrics
from realmops.corpus.special_tokens import prompt_separator
from realmops.evaluate.model_index import reader_results, retriever_results
from realmops.evaluate.run_report import headline_rows
from realmops.model.retriever import Embedder, Retriever
from realmops.model.retriever_files import model_input_names, similarity
from realmops.resources import render_template
from realmops.stages import STAGES, fingerprint
from realmops.stages.runner import stage_inputs

CARD = "README.md"
TEMPLATES = Path(__file__).parent / "cards"
_ONNX = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class Publication:
    """Facts that a model card states in addition to the model itself."""

    root: Path | None = None  # folder of the run, None for a model from the registry
    # Figures that the run measured of this model, by stage
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repository: str | None = None  # OWNER/NAME of its repository on the hub, None for a folder
    licence: str | None = None  # the licence that the card in that repository has, None if unknown

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """The metrics of ``evaluate``; empty if it did not measure this model."""
        return self.metrics.get("evaluate", {})

    @property
    def name(self) -> str:
        """Name of the model in its model-index."""
        return (self.repository or "realmops").rpartition("/")[2]

    @property
    def questions(self) -> str:
        """Name of the file of test questions."""
        return Path(str(self.trained("evaluate").get("questions", {}).get("test", ""))).name

    def trained(self, stage: str) -> dict[str, dict[str, Any]]:
        """Return the options of a stage, by section; empty if they are unknown."""
        return {} if self.root is None else trained_sections(self.root, stage)


def measured_metrics(root: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of a run by stage, without those of ``evaluate`` if the model or its data changed since."""
    metrics, stage = read_metrics(root), STAGES["evaluate"]
    if stage.name not in metrics:
        return metrics
    manifest = artifacts.read_json(root / stage.folder / artifacts.MANIFEST)
    # Files are relative to the folder of the params file, which is often the root or the folder above it.
    for project in (Path(), root, root.parent):
        with suppress(OSError, ValueError):
            inputs = stage_inputs(stage, manifest["sections"], project, root)
            if fingerprint(stage, manifest["sections"], inputs) == manifest["fingerprint"]:
                return metrics
    return {name: values for name, values in metrics.items() if name != stage.name}


def card(
    format: str,
    opened: OpenedModel,
    retriever: Retriever,
    notes: Sequence[str],
    publication: Publication,
    measured: str | None = None,
) -> str:
    """Return the model card of an exported retriever or of its embeddings.

    ``notes`` are the limitations of the export; ``measured`` is the prefix of the metrics of ``evaluate`` that measured
    these embeddings, None if none did.
    """
    model, query = opened.model, retriever.query
    init = publication.trained("ict").get("retriever", {}).get("init")
    results: list[EvalResult] = []
    data: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": "passages.parquet"}]}
    if format != "parquet":
        data = {"library_name": format, "pipeline_tag": "sentence-similarity", "base_model": _base_model(init)}
        if measured is not None:
            results = retriever_results(publication.questions, publication.evaluated, measured)
    facts = {
        "towers": f"{'one' if retriever.shared else 'two, for queries and passages'}: {query.description}",
        "embeddings": f"{query.width} dimensions, compared by {similarity(retriever)}",
        "f(x, z), the logit of p(z|x)": f"{retriever.scale:.6g} times the inner product",
        "wordpieces": f"{model.options.query_wordpieces} of a query, {model.snapshot.block_wordpieces} of a passage",
        "dtype": f"fp32; the run computed in {str(model.dtype).removeprefix('torch.')}",
        "corpus": f"{len(model.snapshot)} passages, {model.snapshot.corpus_hash}, update {opened.number}",
        "vocabulary": model.snapshot.vocabulary_hash,
        "model": f"{opened.version}, fine-tuned for {opened.weights_step} steps",
        "initialised from": {None: "unknown", "small": "an encoder from scratch"}.get(init, _without_folders(init)),
        "realmops": __version__,
    }
    inputs = model_input_names(query.encoder) if isinstance(query, Embedder) else []
    tokenizer, special = model.snapshot.tokenizer, model.special
    files = ("encoder.onnx", "encoder.onnx") if retriever.shared else ("query.onnx", "document.onnx")
    limits = model.options.query_wordpieces, model.snapshot.block_wordpieces
    query_side, document_side = (
        {"file": file, "wordpieces": limit, "blank": prompt_separator(tokenizer, first)}
        for file, limit, first in zip(files, limits, (special.query, special.document), strict=True)
    )
    data["tags"] = ["feature-extraction", "realm", "realmops", format]
    return _card(
        format,
        data,
        results,
        facts,
        publication,
        notes,
        query=query_side,
        document=document_side,
        padding=special.padding,
        inputs=json.dumps({name: _ONNX[name] for name in _ONNX if name in inputs}),
    )


def reader_card(opened: OpenedModel, publication: Publication) -> str:
    """Return the model card of an exported reader."""
    trained = publication.trained("finetune") | publication.trained("snapshot")
    init = trained.get("reader", {}).get("init")
    file = _without_folders(trained.get("questions", {}).get("dev", OWN_QUESTIONS))
    facts = {
        "initialised from": _without_folders(init or "unknown"),
        "documents": _without_folders(trained.get("snapshot", {}).get("documents", "unknown")),
        "training questions": _without_folders(trained.get("questions", {}).get("train", "unknown")),
        "calibration": opened.confidence.description.replace(OWN_QUESTIONS, file) if opened.confidence else "none",
        "answers": f"up to {opened.model.options.answer_wordpieces} wordpieces",
        "model": f"{opened.version}, fine-tuned for {opened.weights_step} steps",
        "realmops": __version__,
    }
    data = {"tags": ["question-answering", "realm", "realmops"]}
    results = reader_results(publication.questions, publication.evaluated)
    return _card("reader", data, results, facts, publication)


def public_reader_card(opened: OpenedModel, init: str, counts: Mapping[str, int], metrics: Mapping[str, Any]) -> str:
    """Return the model card of a reader from ``realmops reader``.

    ``init`` is its encoder; ``counts`` has training questions, and the paragraphs and articles that they are about;
    ``metrics`` are those of ``finetune``.
    """
    model, calibration = opened.model, opened.confidence
    calibrated, results = "none", []
    if calibration is not None:
        threshold = "no threshold reaches" if calibration.holds_all else "confidence.json has the threshold for"
        calibrated = (
            f"{calibration.questions:,} questions of SQuAD about other articles; {threshold} a precision of "
            f"{calibration.wanted_precision:g}"
        )
        measured = {"em": metrics["dev_em"], "f1": metrics["dev_f1"], "questions": calibration.questions}
        articles = "SQuAD 1.1, questions about articles outside the training"
        results = reader_results(articles, measured, "rajpurkar/squad", "train")
    facts = {
        "encoder": _without_folders(init),
        "training questions": f"{counts['questions']:,} of SQuAD 1.1 (Rajpurkar et al. 2016) about "
        f"{counts['paragraphs']:,} paragraphs of {counts['articles']:,} articles of Wikipedia",
        "read": f"{metrics['questions_with_evidence']:,} of them, which have an answer in the passages found",
        "epochs; steps": f"{model.options.epochs:g}; {opened.weights_step}",
        "calibration": calibrated,
        "EM; F1 of these questions": f"{metrics['dev_em']:.3f}; {metrics['dev_f1']:.3f}, over {len(model.snapshot):,} "
        "paragraphs, retrieved by the untrained encoder and BM25",
        "answers": f"up to {model.options.answer_wordpieces} wordpieces",
        "realmops": __version__,
    }
    data = {
        "library_name": "transformers",
        "pipeline_tag": "question-answering",
        "language": "en",
        "datasets": ["rajpurkar/squad"],
        "tags": ["realm", "realmops"],
        "base_model": _base_model(init),
    }
    notes = ("Measure it on questions about your documents: it was evaluated on nothing else than the table shows.",)
    return _card("public_reader", data, results, facts, Publication(), notes)


def _card(
    template: str,
    data: Mapping[str, Any],
    results: Sequence[EvalResult],
    facts: Mapping[str, Any],
    publication: Publication,
    notes: Sequence[str] = (),
    **values: Any,
) -> str:
    licence = None if publication.licence == "unknown" else publication.licence
    index: dict[str, Any] = {"eval_results": [*results], "model_name": publication.name} if results else {}
    front = ModelCardData(license=licence or "unknown", **index, **data)
    return render_template(
        TEMPLATES / f"{template}.md.j2",
        front=front.to_yaml().strip(),
        notes=notes,
        facts=facts,
        licence=licence,
        figures=headline_rows(publication.metrics),
        folder=publication.repository or "FOLDER",
        repository=publication.repository,
        **values,
    )


def _without_folders(name: str | None) -> str:
    """Return a file or a name on the hub, without the folders of this machine."""
    return Path(name or "").name if Path(name or "").is_absolute() else str(name)


def _base_model(init: str | None) -> str | None:
    """Return the hub's link to an encoder, None if that is no name on the hub."""
    return init if init and init.count("/") == 1 and not Path(init).exists() else None
