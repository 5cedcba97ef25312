"""Import of Google's REALM checkpoints in Hugging Face's format (transformers' ``realm``) as retriever and reader.

A folder holds an embedder, a scorer (one or two embedders), a knowledge-augmented encoder, a reader, or a whole
Open-QA model with its passages' embeddings. The names of its parameters show which.

Shape suffixes: P passages, E embedding width, D encoder width, H width of the span head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from realmops.corpus.encoder_tokenizer import read_encoder_vocabulary
from realmops.corpus.vocabulary import build_tokenizer, vocabulary_hash
from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.build import load_pooler
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.reader import Reader, SpanHead
from realmops.model.retriever import Embedder, Retriever
from realmops.model.retriever_files import TextFormat
from realmops.model.transformers_models import MASKED_WORDS, load_transformers_model, remove_pooler

BLOCK_EMBEDDINGS = "block_emb"
_BERT_NAMES = ("realm.", "cls.predictions.")
_KINDS = "embedder, scorer, encoder, reader and openqa checkpoints"
Part = TypeVar("Part")


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One published checkpoint: its configuration, memory-mapped weights by name, and how it reads texts."""

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    text: TextFormat

    def tower(self, prefix: str) -> Embedder | None:
        """Build the embedder whose parameter names begin with ``prefix``, if the checkpoint has one."""
        projection = self.weights.get(f"{prefix}cls.dense.weight")
        if projection is None:
            return None
        state, source = self._weights_of(prefix), str(self.folder)
        encoder, _ = _bert(self.config, state, source)
        tower = Embedder(encoder, projection.shape[0], "release")
        assert tower.pooler is not None
        assert tower.projection is not None
        assert tower.norm is not None
        if not load_pooler(tower.pooler, state):
            raise ValueError(f"{source}: its embedder has no pooler (realm.pooler.dense); download it again")
        _fill(tower.projection, state, "cls.dense", source)
        _fill(tower.norm, state, "cls.LayerNorm", source)
        return tower

    @cached_property
    def query(self) -> Embedder | None:
        """Query embedder: the scorer's second embedder, or the only one."""
        return self._first_tower("query_embedder.", "embedder.", "")

    @cached_property
    def retriever(self) -> Retriever | None:
        """Retriever of both embedders, shared if they are equal; passages use the scorer's first one."""
        query, document = self.query, self._first_tower("embedder.", "query_embedder.", "")
        if query is None or document is None:
            return None
        document_state = document.state_dict()
        is_shared = all(torch.equal(tensor, document_state[name]) for name, tensor in query.state_dict().items())
        return Retriever(document if is_shared else query, document)

    @cached_property
    def reader(self) -> Reader | None:
        """Reader with its masked word head, and with a span head if the checkpoint has one."""
        for prefix in ("reader.", ""):
            state = self._weights_of(prefix)
            if any(name.startswith("realm.") for name in state) and "cls.dense.weight" not in state:
                return self._reader(state)
        return None

    @property
    def embeddings(self) -> Tensor | None:
        """Embeddings of all passages P x E, memory-mapped."""
        return self.weights.get(BLOCK_EMBEDDINGS)

    def _first_tower(self, *prefixes: str) -> Embedder | None:
        return next((tower for prefix in prefixes if (tower := self.tower(prefix)) is not None), None)

    def _weights_of(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(prefix)}

    def _reader(self, state: Mapping[str, Tensor]) -> Reader:
        source = str(self.folder)
        encoder, head = _bert(self.config, state, source)
        if head is None:
            raise ValueError(f"{source}: its reader has no masked word head (cls.predictions); download it again")
        reader = Reader(encoder, head)
        if "qa_outputs.dense_intermediate.weight" in state:
            reader.spans = _span_head(state, float(self.config.get("reader_layer_norm_eps", 1e-3)), source)
        return reader


def read_checkpoint(folder: Path) -> PublishedCheckpoint:
    """Open a published checkpoint; raise ValueError if it is not one of REALM."""
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
    """Return retriever and reader of REALM's pre-training, each from the first folder with one; without a span head."""
    retriever = _first(
        folders, lambda checkpoint: checkpoint.retriever, "a retriever (an embedder, a scorer or an openqa folder)"
    )
    reader = _first(folders, lambda checkpoint: checkpoint.reader, "a reader (an encoder or an openqa folder)")
    reader.spans = None  # untrained in an openqa folder of pre-training
    return retriever, reader


def finetuned_models(folders: Sequence[PublishedCheckpoint], pretrained: Retriever | None) -> tuple[Retriever, Reader]:
    """Return retriever and reader after fine-tuning; the document tower is the pre-trained one, if given."""
    query = _first(folders, lambda checkpoint: checkpoint.query, "a query embedder (an openqa folder)")
    reader = _first(folders, lambda checkpoint: checkpoint.reader, "a reader (a reader or an openqa folder)")
    if reader.spans is None:
        raise ValueError(f"{_names(folders)}: the reader has no span head (qa_outputs); pass a fine-tuned checkpoint")
    return Retriever(query, query if pretrained is None else pretrained.document), reader


def _first(
    folders: Sequence[PublishedCheckpoint], part: Callable[[PublishedCheckpoint], Part | None], what: str
) -> Part:
    for folder in folders:
        model = part(folder)
        if model is not None:
            return model
    raise ValueError(f"{_names(folders)}: {what} is missing; pass its folder too")


def _names(folders: Sequence[PublishedCheckpoint]) -> str:
    return ", ".join(str(checkpoint.folder) for checkpoint in folders)


def _span_head(state: Mapping[str, Tensor], eps: float, source: str) -> SpanHead:
    """Build a span head from the published layer, which concatenates start and end, each with a bias.

    Only the sum of the two biases matters. Later biases add a constant to all span scores and are dropped.
    """
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
    """Build a BERT encoder, and its masked word head if the weights have one."""
    bert_state = {name: tensor for name, tensor in state.items() if name.startswith(_BERT_NAMES)}
    model, missing = load_transformers_model(bert_state, config, source, MASKED_WORDS)
    if absent := [name for name in missing if name.startswith("bert.") and "pooler" not in name]:
        name = absent[0].replace("bert.", "realm.", 1)
        raise ValueError(f"{source}: the parameter {name} is missing; download it again")
    encoder = Encoder(remove_pooler(model.base_model), packs=True)
    head = MaskedWordHead(model)
    return encoder, None if any(name.startswith("cls.") for name in missing) else head


def _fill(module: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    module.load_state_dict({kind: _take(state, f"{name}.{kind}", source) for kind in module.state_dict()})


def _take(state: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in state:
        raise ValueError(f"{source}: the parameter {name} is missing; download the folder again")
    return state[name].float()
