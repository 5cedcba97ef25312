"""Import of Google's REALM checkpoints in Hugging Face's format (transformers' ``realm``) as retriever and reader.

A folder holds an embedder, a scorer (one or two embedders), a knowledge-augmented encoder, a reader, or a whole
Open-QA model with its passages' embeddings. The names of its parameters show which; a model is built from the first
folder that has its parameters.

Shape suffixes: P passages, E embedding width, D encoder width, H width of the span head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realmops.corpus.encoder_tokenizer import read_encoder_vocabulary
from realmops.corpus.vocabulary import build_tokenizer, vocabulary_hash
from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.reader import Reader, SpanHead
from realmops.model.retriever import Embedder, Retriever
from realmops.model.retriever_files import TextFormat
from realmops.model.transformers_models import MASKED_WORDS, load_transformers_model

BLOCK_EMBEDDINGS = "block_emb"  # of all passages, P x E
_QUERY = ("query_embedder.", "embedder.", "")  # prefixes: a scorer's second embedder, or the only one
_DOCUMENT = ("embedder.", "query_embedder.", "")
_READER = ("reader.", "")
_WORDS, _PROJECTION = "realm.embeddings.word_embeddings.weight", "cls.dense.weight"
_BERT_NAMES = ("realm.", "cls.predictions.")
_KINDS = "embedder, scorer, encoder, reader and openqa checkpoints"


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One published checkpoint: its configuration, memory-mapped weights by name, and how it reads texts."""

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    text: TextFormat


def read_checkpoint(folder: Path) -> PublishedCheckpoint:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass a complete download ({_KINDS})")
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    if config.get("model_type") != "realm":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {config.get('model_type')!r}, expected 'realm' ({_KINDS}); use other "
            "encoders with retriever.init"
        )
    pieces, casing = read_encoder_vocabulary(folder)
    text = TextFormat(
        build_tokenizer(pieces, casing), vocabulary_hash(pieces), config.get("max_position_embeddings", 512)
    )
    return PublishedCheckpoint(folder, config, read_weights(folder), text)


def pretrained_models(folders: Sequence[PublishedCheckpoint]) -> tuple[Retriever, Reader]:
    """Return retriever and reader of REALM's pre-training, without a span head."""
    what = "a retriever (an embedder, a scorer or an openqa folder)"
    query, document = _tower(folders, _QUERY, what), _tower(folders, _DOCUMENT, what)
    document_state = document.state_dict()
    is_shared = all(torch.equal(tensor, document_state[name]) for name, tensor in query.state_dict().items())
    reader = _reader(folders, "a reader (an encoder or an openqa folder)")
    reader.spans = None  # untrained in an openqa folder of pre-training
    return Retriever(document if is_shared else query, document), reader


def finetuned_models(folders: Sequence[PublishedCheckpoint], pretrained: Retriever | None) -> tuple[Retriever, Reader]:
    """Return retriever and reader after fine-tuning; the document tower is the pre-trained one, if given."""
    query = _tower(folders, _QUERY, "a query embedder (an openqa folder)")
    reader = _reader(folders, "a reader (a reader or an openqa folder)")
    if reader.spans is None:
        raise ValueError(f"{_names(folders)}: the reader has no span head (qa_outputs); pass a fine-tuned checkpoint")
    return Retriever(query, query if pretrained is None else pretrained.document), reader


def _locate(
    folders: Sequence[PublishedCheckpoint], prefixes: Sequence[str], is_embedder: bool, what: str
) -> tuple[PublishedCheckpoint, dict[str, Tensor]]:
    for checkpoint in folders:
        for prefix in prefixes:
            state = {name.removeprefix(prefix): x for name, x in checkpoint.weights.items() if name.startswith(prefix)}
            if _WORDS in state and (_PROJECTION in state) == is_embedder:
                return checkpoint, state
    raise ValueError(f"{_names(folders)}: {what} is missing; pass its folder too")


def _names(folders: Sequence[PublishedCheckpoint]) -> str:
    return ", ".join(str(checkpoint.folder) for checkpoint in folders)


def _tower(folders: Sequence[PublishedCheckpoint], prefixes: Sequence[str], what: str) -> Embedder:
    checkpoint, state = _locate(folders, prefixes, True, what)
    source = str(checkpoint.folder)
    tower = Embedder(_bert(checkpoint.config, state, source)[0], len(state[_PROJECTION]), "release")
    parts = {"realm.pooler.dense": tower.pooler, "cls.dense": tower.projection, "cls.LayerNorm": tower.norm}
    for name, part in parts.items():
        assert part is not None
        _fill(part, state, name, source)
    return tower


def _reader(folders: Sequence[PublishedCheckpoint], what: str) -> Reader:
    checkpoint, state = _locate(folders, _READER, False, what)
    source = str(checkpoint.folder)
    encoder, head = _bert(checkpoint.config, state, source)
    if head is None:
        raise ValueError(f"{source}: its reader has no masked word head (cls.predictions); download it again")
    reader = Reader(encoder, head)
    if "qa_outputs.dense_intermediate.weight" in state:
        reader.spans = _span_head(state, float(checkpoint.config.get("reader_layer_norm_eps", 1e-3)), source)
    return reader


def _span_head(state: Mapping[str, Tensor], eps: float, source: str) -> SpanHead:
    """Build a span head: the published layer concatenates start and end; biases equal for all spans are dropped."""
    weight_HD, bias_H = (_take(state, f"qa_outputs.dense_intermediate.{kind}", source) for kind in ("weight", "bias"))
    head = SpanHead(weight_HD.shape[1], weight_HD.shape[0] // 2, eps)
    start_HD, end_HD = weight_HD.chunk(2)
    start_H, end_H = bias_H.chunk(2)
    head.start.load_state_dict({"weight": start_HD, "bias": start_H + end_H})
    head.end.load_state_dict({"weight": end_HD})
    _fill(head.norm, state, "qa_outputs.layer_normalization", source)
    _fill(head.score, state, "qa_outputs.dense_output", source)
    return head


def _bert(config: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> tuple[Encoder, MaskedWordHead | None]:
    bert_state = {name: tensor for name, tensor in state.items() if name.startswith(_BERT_NAMES)}
    model, missing = load_transformers_model(bert_state, config, source, MASKED_WORDS)
    encoder = Encoder(model.base_model, packs=True)
    return encoder, None if missing else MaskedWordHead(model)


def _fill(module: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    module.load_state_dict({kind: _take(state, f"{name}.{kind}", source) for kind in module.state_dict()})


def _take(state: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in state:
        raise ValueError(f"{source}: the parameter {name} is missing; download the folder again")
    return state[name].float()
