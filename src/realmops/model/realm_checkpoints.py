"""Google's REALM checkpoints as Hugging Face published them (transformers' ``realm``), as our retriever and reader.

A folder holds an embedder, a scorer (one or two embedders), a knowledge-augmented encoder, a reader, or all of
an Open-QA model with its passages' embeddings.  What it holds is told by the names of its parameters.

Shape suffixes: P passages, E embedding width, D encoder width, H width of the span head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from realmops.hub import CONFIG, read_config, read_weights
from realmops.model.checkpoint_files import load_pooler
from realmops.model.encoder import Encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.reader import Reader, SpanHead
from realmops.model.retriever import Embedder, Retriever
from realmops.model.transformers_models import open_model, without_pooler
from realmops.text.pretrained import read_encoder_vocabulary
from realmops.text.vocabulary import vocabulary_hash

BLOCK_EMBEDDINGS = "block_emb"
_BERT_NAMES = ("realm.", "cls.predictions.")
_KINDS = "embedder, scorer, encoder, reader and openqa checkpoints"
Part = TypeVar("Part")


@dataclass(frozen=True)
class Published:
    """One published folder: its weights by name, memory-mapped, and the hash of its vocabulary."""

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    vocabulary_hash: str

    def tower(self, prefix: str) -> Embedder | None:
        """The embedder whose parameters' names begin so, if there is one."""
        projection = self.weights.get(f"{prefix}cls.dense.weight")
        if projection is None:
            return None
        state, source = self._under(prefix), str(self.folder)
        encoder, _ = _bert(self.config, state, source)
        tower = Embedder(encoder, projection.shape[0], "release")
        assert tower.pooler is not None
        assert tower.projection is not None
        assert tower.norm is not None
        if not load_pooler(tower.pooler, state):
            raise ValueError(f"{source}: its embedder has no pooler (realm.pooler.dense); fetch it again")
        _fill(tower.projection, state, "cls.dense", source)
        _fill(tower.norm, state, "cls.LayerNorm", source)
        return tower

    @cached_property
    def query(self) -> Embedder | None:
        """The embedder of queries: the scorer's second one, or the only one."""
        return self._first_tower("query_embedder.", "embedder.", "")

    @cached_property
    def retriever(self) -> Retriever | None:
        """Both embedders, one where they are equal; that of passages is the scorer's first one, or the only one."""
        query, document = self.query, self._first_tower("embedder.", "query_embedder.", "")
        if query is None or document is None:
            return None
        theirs = document.state_dict()
        same = all(torch.equal(tensor, theirs[name]) for name, tensor in query.state_dict().items())
        return Retriever(document if same else query, document)

    @cached_property
    def reader(self) -> Reader | None:
        """The encoder over query and passage with its masked word head, and its span head if it has one."""
        for prefix in ("reader.", ""):
            state = self._under(prefix)
            if any(name.startswith("realm.") for name in state) and "cls.dense.weight" not in state:
                return self._reader(state)
        return None

    @property
    def embeddings(self) -> Tensor | None:
        """The embeddings of all passages P x E, still on disk."""
        return self.weights.get(BLOCK_EMBEDDINGS)

    def _first_tower(self, *prefixes: str) -> Embedder | None:
        return next((tower for prefix in prefixes if (tower := self.tower(prefix)) is not None), None)

    def _under(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(prefix)}

    def _reader(self, state: Mapping[str, Tensor]) -> Reader:
        source = str(self.folder)
        encoder, head = _bert(self.config, state, source)
        if head is None:
            raise ValueError(f"{source}: its reader has no masked word head (cls.predictions); fetch it again")
        reader = Reader(encoder, head)
        if "qa_outputs.dense_intermediate.weight" in state:
            reader.spans = _span_head(state, float(self.config.get("reader_layer_norm_eps", 1e-3)), source)
        return reader


def read_published(folder: Path) -> Published:
    """Open a published folder; ValueError when it is none of REALM's."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that was downloaded whole ({_KINDS})")
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    if config.get("model_type") != "realm":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {config.get('model_type')!r}, not 'realm'; {_KINDS} can be imported, "
            "other encoders are named with bert.init"
        )
    pieces, _ = read_encoder_vocabulary(folder)
    return Published(folder, config, read_weights(folder), vocabulary_hash(pieces))


def pretrained_models(folders: Sequence[Published]) -> tuple[Retriever, Reader]:
    """Retriever and reader of REALM's pre-training, each from the first folder that holds it; without a span head."""
    retriever = _first(folders, lambda one: one.retriever, "a retriever (an embedder, a scorer or an openqa folder)")
    reader = _first(folders, lambda one: one.reader, "a reader (an encoder or an openqa folder)")
    reader.spans = None  # of an openqa folder that was not fine-tuned: random numbers
    return retriever, reader


def finetuned_models(folders: Sequence[Published], pretrained: Retriever | None) -> tuple[Retriever, Reader]:
    """Query tower and reader after fine-tuning; passages keep the pre-trained tower, where there is one."""
    query = _first(folders, lambda one: one.query, "a query embedder (an openqa folder)")
    reader = _first(folders, lambda one: one.reader, "a reader (a reader or an openqa folder)")
    if reader.spans is None:
        raise ValueError(f"{_names(folders)}: the reader has no span head (qa_outputs); name a fine-tuned one")
    return Retriever(query, query if pretrained is None else pretrained.document), reader


def _first(folders: Sequence[Published], part: Callable[[Published], Part | None], what: str) -> Part:
    for folder in folders:
        found = part(folder)
        if found is not None:
            return found
    raise ValueError(f"{_names(folders)}: {what} is missing; name its folder too")


def _names(folders: Sequence[Published]) -> str:
    return ", ".join(str(found.folder) for found in folders)


def _span_head(state: Mapping[str, Tensor], eps: float, source: str) -> SpanHead:
    """The published layer holds start and end in one, with a bias for each; only the sum of the biases counts.

    The biases behind it add one number to the scores of all spans; they are left out.
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
    """Return a BERT, and its masked word head if the weights have one."""
    theirs = {name: tensor for name, tensor in state.items() if name.startswith(_BERT_NAMES)}
    model, missing = open_model(theirs, config, source, predicts=True)
    if absent := [name for name in missing if name.startswith("bert.") and "pooler" not in name]:
        name = absent[0].replace("bert.", "realm.", 1)
        raise ValueError(f"{source}: the parameter {name} is missing; fetch it again")
    encoder = Encoder(without_pooler(model.base_model), packs=True)
    head = MaskedWordHead(model)
    return encoder, None if any(name.startswith("cls.") for name in missing) else head


def _fill(module: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    module.load_state_dict({kind: _take(state, f"{name}.{kind}", source) for kind in module.state_dict()})


def _take(state: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in state:
        raise ValueError(f"{source}: the parameter {name} is missing; fetch the folder again")
    return state[name].float()
