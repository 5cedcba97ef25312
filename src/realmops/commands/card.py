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
from realmops.commands.report import read_metrics
from realmops.config import parse_sections, recorded_options
from realmops.corpus.special_tokens import prompt_separator
from realmops.evaluate.model_index import reader_results, retriever_results
from realmops.evaluate.run_report import headline_rows
from realmops.hub import HUB
from realmops.model.retriever import Embedder, Retriever
from realmops.model.retriever_files import model_input_names, similarity
from realmops.options import Options
from realmops.resources import render_template
from realmops.stages import INIT, STAGES, fingerprint
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
    def questions(self) -> str:
        options = self.trained("evaluate")
        return Path(options.questions.test).name if options else ""

    @property
    def base_model(self) -> str | None:
        """The encoder's name on the hub, as its training has recorded it; None for a folder, or if it is unknown."""
        path = Path() if self.root is None else self.root / STAGES["ict"].folder / artifacts.MANIFEST
        names = artifacts.read_json(path).get("hub", {}) if path.is_file() else {}
        return names[INIT].partition("@")[0] if INIT in names else None

    def trained(self, stage: str) -> Options | None:
        return None if self.root is None else recorded_options(self.root / STAGES[stage].folder)


def measured_metrics(root: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of a run by stage, without those of ``evaluate`` if the model or its data changed since."""
    metrics, stage = read_metrics(root), STAGES["evaluate"]
    if stage.name not in metrics:
        return metrics
    manifest = artifacts.read_json(root / stage.folder / artifacts.MANIFEST)
    # Files are relative to the folder of the params file, which is often the root or the folder above it.
    for project in (Path(), root, root.parent):
        with suppress(OSError, ValueError):
            options = parse_sections((str(root), manifest["sections"]))
            if fingerprint(stage, options, stage_inputs(stage, options, project, root)) == manifest["fingerprint"]:
                return metrics
    return {name: values for name, values in metrics.items() if name != stage.name}


def limitations(format: str, opened: OpenedModel, **facts: bool) -> list[str]:
    text = render_template(TEMPLATES / "notes.md.j2", format=format, opened=opened, **facts)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def card(
    format: str,
    opened: OpenedModel,
    retriever: Retriever,
    notes: Sequence[str],
    publication: Publication,
    measured: str | None = None,
) -> str:
    """Return the model card of a retriever or its embeddings; ``measured`` is the prefix of their metrics, if any."""
    model, query = opened.model, retriever.query
    warmed = publication.trained("ict")
    init = warmed.retriever.init if warmed else None
    results: list[EvalResult] = []
    data: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": "passages.parquet"}]}
    if format != "parquet":
        data = {"library_name": format, "pipeline_tag": "sentence-similarity", "base_model": publication.base_model}
        if measured is not None:
            results = retriever_results(publication.questions, publication.evaluated, measured)
    data["tags"] = ["feature-extraction", "realm", "realmops", format]
    inputs = model_input_names(query.encoder) if isinstance(query, Embedder) else []
    blanks = [prompt_separator(model.snapshot.tokenizer, p) for p in (model.special.query, model.special.document)]
    return _card(
        format,
        data,
        results,
        publication,
        notes,
        opened=opened,
        retriever=retriever,
        similarity=similarity(retriever),
        trained=publication.trained,
        init={None: "unknown", "small": "an encoder from scratch"}.get(init, _without_folders(init)),
        blanks=blanks,
        inputs=json.dumps({name: _ONNX[name] for name in _ONNX if name in inputs}),
    )


def reader_card(opened: OpenedModel, publication: Publication) -> str:
    tuned, split = publication.trained("finetune"), publication.trained("snapshot")
    data = {"tags": ["question-answering", "realm", "realmops"]}
    results = reader_results(publication.questions, publication.evaluated)
    facts = {"opened": opened, "tuned": tuned, "split": split, "own_questions": OWN_QUESTIONS}
    return _card("reader", data, results, publication, (), **facts)


def public_reader_card(opened: OpenedModel, init: str, counts: Mapping[str, int], metrics: Mapping[str, Any]) -> str:
    """Return the model card of a reader from ``realmops reader``, with its data's ``counts``."""
    results = []
    if opened.confidence is not None:
        measured = {"em": metrics["dev_em"], "f1": metrics["dev_f1"], "questions": opened.confidence.questions}
        articles = "SQuAD 1.1, questions about articles outside the training"
        results = reader_results(articles, measured, "rajpurkar/squad", "train")
    data = {
        "library_name": "transformers",
        "pipeline_tag": "question-answering",
        "language": "en",
        "datasets": ["rajpurkar/squad"],
        "tags": ["realm", "realmops"],
        "base_model": None if Path(init).is_absolute() else init.removeprefix(HUB),
    }
    return _card(
        "public_reader", data, results, Publication(), opened=opened, init=init, counts=counts, metrics=metrics
    )


def _card(
    template: str,
    data: Mapping[str, Any],
    results: Sequence[EvalResult],
    publication: Publication,
    notes: Sequence[str] = (),
    **values: Any,
) -> str:
    licence = None if publication.licence == "unknown" else publication.licence
    name = (publication.repository or "realmops").rpartition("/")[2]
    index: dict[str, Any] = {"eval_results": [*results], "model_name": name} if results else {}
    front = ModelCardData(license=licence or "unknown", **index, **data)
    return render_template(
        TEMPLATES / f"{template}.md.j2",
        front=front.to_yaml().strip(),
        notes=notes,
        licence=licence,
        figures=headline_rows(publication.metrics),
        folder=publication.repository or "FOLDER",
        repository=publication.repository,
        version=__version__,
        name_of=_without_folders,
        **values,
    )


def _without_folders(name: str | None) -> str:
    return Path(name or "").name if Path(name or "").is_absolute() else str(name)
