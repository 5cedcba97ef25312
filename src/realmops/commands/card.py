"""The model card of an export: README.md with the front matter of the Hugging Face hub."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from realmops import __version__, artifacts
from realmops.answering.confidence import OWN_QUESTIONS
from realmops.answering.opened_model import OpenedModel
from realmops.commands.report import read_metrics
from realmops.corpus.special_tokens import prompt_separator
from realmops.evaluate.model_index import reader_index, retriever_index
from realmops.evaluate.run_report import headline_rows
from realmops.model.portable import model_input_names, similarity
from realmops.model.retriever import Embedder, Retriever
from realmops.stages import STAGES, fingerprint
from realmops.stages.runner import stage_inputs
from realmops.stages.trained import trained_sections

CARD = "README.md"
_ONNX = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_USE = {  # by format
    "sentence-transformers": """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
queries = model.encode_query(["Where was Anna Berg born?"])
passages = model.encode_document([("Anna Berg", "Anna Berg was born in Oslo.")])
model.similarity(queries, passages)
```

A passage is the pair of its title and its text; without a title it is `("", text)`.

MTEB joins title and text by a blank, and truncates a document at DOCUMENT_LIMIT wordpieces. To score this model as it
was trained, pass it the pairs:

```python
import mteb
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper

class Pairs(SentenceTransformerEncoderWrapper):
    def encode(self, inputs, *, prompt_type=None, **options):
        if prompt_type is None or prompt_type.value != "document":
            return super().encode(inputs, prompt_type=prompt_type, **options)
        batches = [(batch.get("title") or [""] * len(batch["body"]), batch["body"]) for batch in inputs]
        return self.model.encode_document([pair for titles, texts in batches for pair in zip(titles, texts)])

result = mteb.evaluate(Pairs("FOLDER"), mteb.get_tasks(tasks=["SciFact"]))
```

A longer document has the score of its best passage in the run, unless `snapshot.whole_documents` is true.
""",
    "onnx": """\
```python
import numpy, onnxruntime, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("FOLDER/tokenizer.json")

def embed(file, wordpieces, texts):
    tokenizer.enable_truncation(wordpieces)
    tokenizer.enable_padding(pad_id=PADDING)
    batch = tokenizer.encode_batch(texts)
    inputs = ONNX_INPUTS
    inputs = {name: numpy.array([getattr(text, of) for text in batch]) for name, of in inputs.items()}
    return onnxruntime.InferenceSession(f"FOLDER/{file}").run(None, inputs)[0]

queries = embed("QUERY_FILE", QUERY_LIMIT, ["QUERY_BLANKWhere was Anna Berg born?"])
passages = embed("DOCUMENT_FILE", DOCUMENT_LIMIT, [("DOCUMENT_BLANKAnna Berg", "Anna Berg was born in Oslo.")])
```

A passage is the pair of its title and its text; without a title it is `("DOCUMENT_BLANK", text)`.BLANK_NOTE
""",
    "parquet": """\
| column of passages.parquet | content |
|---|---|
| `passage_id`, `document_id`, `title`, `text` | the passage and its document |
| `extra` | other fields of the document, as JSON, or empty |
| `start`, `end` | the character offsets of the passage in the document's text |
| `uri`, `page` | the document's address or file, and the page on which the passage begins, if it has pages |
| `vector`, `embedding` | the index of the vector, 0 if a passage has one, and its values |

Get question embeddings with a model from `realmops export FOLDER --format sentence-transformers` or `onnx`.
""",
}
_READER_USE = """\
```python
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer, model = (kind.from_pretrained("FOLDER") for kind in (AutoTokenizer, AutoModelForQuestionAnswering))
inputs = tokenizer("Where was Anna Berg born?", "Anna Berg was born in Oslo.", return_tensors="pt")
with torch.no_grad():
    scores = model(**inputs)
start, end = scores.start_logits.argmax(), scores.end_logits.argmax()
answer = tokenizer.decode(inputs["input_ids"][0, start : end + 1])
```

If both are the first token of the sequence, the text has no answer. To answer questions about your documents, with the
text that supports each answer:

```
realmops init --documents DOCUMENTS --reader FOLDER
realmops run all
realmops ask "Your question?"
```
"""
_LICENCE = (
    "Unknown to realmops. It depends on the encoder that training started from, on the documents and on the "
    "questions: set it in the first lines of this file before you publish it.\n"
)
_SQUAD_LICENCE = (
    "The training questions and paragraphs are those of SQuAD 1.1, licensed under CC BY-SA 4.0; the paragraphs are "
    "from Wikipedia. The encoder has its own licence. Which one these weights have is unknown to realmops: set it "
    "in the first lines of this file before you publish them.\n"
)


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
    model = opened.model
    init = publication.trained("ict").get("retriever", {}).get("init")
    figures: dict[str, Any] = {}
    if measured is not None and format != "parquet":
        figures = retriever_index(publication.name, publication.questions, publication.evaluated, measured)
    facts = {
        "towers": f"{'one' if retriever.shared else 'two, for queries and passages'}: {retriever.query.description}",
        "embeddings": f"{retriever.query.width} dimensions, compared by {similarity(retriever)}",
        "f(x, z), the logit of p(z|x)": f"{retriever.scale:.6g} times the inner product",
        "wordpieces": f"{model.options.query_wordpieces} of a query, {model.snapshot.block_wordpieces} of a passage",
        "dtype": f"fp32; the run computed in {str(model.dtype).removeprefix('torch.')}",
        "corpus": f"{len(model.snapshot)} passages, {model.snapshot.corpus_hash}, update {opened.number}",
        "vocabulary": model.snapshot.vocabulary_hash,
        "model": f"{opened.version}, fine-tuned for {opened.weights_step} steps",
        "initialised from": {None: "unknown", "small": "an encoder from scratch"}.get(init, _without_folders(init)),
        "realmops": __version__,
    }
    return _card(
        _front_matter(format, init) | figures,
        f"# {'Passages with embeddings' if format == 'parquet' else 'A retriever'} of REALM\n\n"
        "The retriever was trained on masked words (REALM, Guu et al. 2020) and exported by realmops.\n",
        _filled(_USE[format], opened, retriever),
        notes,
        facts,
        publication,
    )


def reader_card(opened: OpenedModel, publication: Publication) -> str:
    """Return the model card of an exported reader."""
    model = opened.model
    trained = publication.trained("finetune") | publication.trained("snapshot")
    init = trained.get("reader", {}).get("init")
    file = _without_folders(trained.get("questions", {}).get("dev", OWN_QUESTIONS))
    calibration = opened.confidence.description.replace(OWN_QUESTIONS, file) if opened.confidence else "none"
    facts = {
        "initialised from": _without_folders(init or "unknown"),
        "documents": _without_folders(trained.get("snapshot", {}).get("documents", "unknown")),
        "training questions": _without_folders(trained.get("questions", {}).get("train", "unknown")),
        "calibration": calibration,
        "answers": f"up to {model.options.answer_wordpieces} wordpieces",
        "model": f"{opened.version}, fine-tuned for {opened.weights_step} steps",
        "realmops": __version__,
    }
    front = {"license": "unknown", "tags": ["question-answering", "realm", "realmops"]}
    head = "# A reader of REALM\n\nIt extracts the answer to a question from a passage; trained by realmops.\n"
    figures = reader_index(publication.name, publication.questions, publication.evaluated)
    return _card(front | figures, head, _READER_USE, (), facts, publication)


def public_reader_card(opened: OpenedModel, init: str, counts: Mapping[str, int], metrics: Mapping[str, Any]) -> str:
    """Return the model card of a reader from ``realmops reader``.

    ``init`` is its encoder; ``counts`` has training questions, and the paragraphs and articles that they are about;
    ``metrics`` are those of ``finetune``.
    """
    model, calibration = opened.model, opened.confidence
    front: dict[str, Any] = {
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "question-answering",
        "language": "en",
        "datasets": ["rajpurkar/squad"],
        "tags": ["realm", "realmops"],
    }
    calibrated = "none"
    if calibration is not None:
        threshold = "no threshold reaches" if calibration.holds_all else "confidence.json has the threshold for"
        calibrated = (
            f"{calibration.questions:,} questions of SQuAD about other articles; {threshold} a precision of "
            f"{calibration.wanted_precision:g}"
        )
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
    if calibration is not None:
        measured = {"em": metrics["dev_em"], "f1": metrics["dev_f1"], "questions": calibration.questions}
        articles = "SQuAD 1.1, questions about articles outside the training"
        front |= reader_index("realmops", articles, measured, "rajpurkar/squad", "train")
    notes = ("Measure it on questions about your documents: it was evaluated on nothing else than the table shows.",)
    head = "# A reader of answers, trained on public questions\n\nIt extracts the answer to a question from a text.\n"
    return _card(front | _base_model(init), head, _READER_USE, notes, facts, Publication(), _SQUAD_LICENCE)


def _card(
    front: Mapping[str, Any],
    head: str,
    use: str,
    notes: Sequence[str],
    facts: Mapping[str, Any],
    publication: Publication,
    licence: str = _LICENCE,
) -> str:
    if publication.repository and "FOLDER/" in use:
        use = f"```\nhf download {publication.repository} --local-dir FOLDER\n```\n\n{use}"
    elif publication.repository:
        use = use.replace("FOLDER", publication.repository)
    if publication.licence not in (None, "unknown"):
        front = {**front, "license": publication.licence}
        licence = f"{publication.licence}, as the card in the repository stated before this export.\n"
    parts = [
        f"---\n{yaml.safe_dump(front)}---\n",
        head,
        use,
        *(f"**Note.** {note}\n" for note in notes),
        "## Provenance\n",
        _table(("property", "value"), facts.items()),
        "`manifest.json` has the sha256 of every file.\n",
        "## Licence\n",
        licence,
    ]
    if figures := headline_rows(publication.metrics):
        parts += ["## Results of the run\n", _table(("metric", "value", "95 % interval over questions"), figures)]
    return "\n".join(parts)


def _without_folders(name: str | None) -> str:
    """Return a file or a name on the hub, without the folders of this machine."""
    return Path(name or "").name if Path(name or "").is_absolute() else str(name)


def _front_matter(format: str, init: str | None) -> dict[str, Any]:
    about: dict[str, Any] = {"license": "unknown", "tags": ["feature-extraction", "realm", "realmops", format]}
    if format == "parquet":
        return about | {"configs": [{"config_name": "default", "data_files": "passages.parquet"}]}
    return about | _base_model(init) | {"library_name": format, "pipeline_tag": "sentence-similarity"}


def _base_model(init: str | None) -> dict[str, str]:
    """Return the hub's link to an encoder, if that is a name on the hub."""
    return {"base_model": init} if init and init.count("/") == 1 and not Path(init).exists() else {}


def _filled(text: str, opened: OpenedModel, retriever: Retriever) -> str:
    tower = retriever.query
    inputs = model_input_names(tower.encoder) if isinstance(tower, Embedder) else []
    tokenizer, special = opened.model.snapshot.tokenizer, opened.model.special
    query, document = (prompt_separator(tokenizer, first) for first in (special.query, special.document))
    note = " The leading blank of a question or title is part of its first wordpiece." if query or document else ""
    values = {
        "ONNX_INPUTS": json.dumps({name: _ONNX[name] for name in _ONNX if name in inputs}),
        "PADDING": special.padding,
        "QUERY_LIMIT": opened.model.options.query_wordpieces,
        "DOCUMENT_LIMIT": opened.model.snapshot.block_wordpieces,
        "QUERY_FILE": "encoder.onnx" if retriever.shared else "query.onnx",
        "DOCUMENT_FILE": "encoder.onnx" if retriever.shared else "document.onnx",
        "QUERY_BLANK": query,
        "DOCUMENT_BLANK": document,
        "BLANK_NOTE": note,
    }
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |\n" for line in lines)
