"""Both models of a stage as files; the reader is a folder of transformers with its masked word head.

What transformers does not know is in ``realmops.safetensors`` and ``realmops.json`` of that folder.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from realmops.artifacts import write_json
from realmops.hub import read_config, read_weights
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import cpu_state, open_encoder, save_encoder
from realmops.model.masked_word_head import MaskedWordHead
from realmops.model.reader import READERS, Reader, SpanHead
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import (
    DESCRIPTION,
    FORMAT,
    RETRIEVER_FOLDER,
    TextFormat,
    load_retriever,
    read_description,
    save_retriever,
    tokenizer_files,
)

READER_FOLDER = "reader"  # below the folder of a stage
OWN_WEIGHTS = "realmops.safetensors"


def save_models(stage: Path, retriever: Retriever, reader: Reader | None, text: TextFormat) -> None:
    save_retriever(stage / RETRIEVER_FOLDER, retriever, text)
    if reader is not None:
        save_reader(stage / READER_FOLDER, reader, text)


def load_models(stage: Path, vocabulary_hash: str) -> tuple[Retriever, Reader]:
    """Load both models; raise ValueError if their vocabulary or their version of realmops differs."""
    return load_retriever(stage, vocabulary_hash), load_reader(stage, vocabulary_hash)


def copy_models(source: Path, target: Path) -> None:
    for name in (RETRIEVER_FOLDER, READER_FOLDER):
        shutil.copytree(source / name, target / name)


def model_files(stage: Path) -> list[Path]:
    """Return the files of both models in a fixed order; they determine all that the models compute."""
    return sorted(
        path for name in (RETRIEVER_FOLDER, READER_FOLDER) for path in (stage / name).rglob("*") if path.is_file()
    )


def save_reader(folder: Path, reader: Reader, text: TextFormat) -> None:
    save_encoder(folder, reader.encoder, reader.masked_words)
    for name, content in tokenizer_files(text.tokenizer, reader.encoder, reader.encoder.positions).items():
        (folder / name).write_bytes(content)
    if state := own_state(reader):
        (folder / OWN_WEIGHTS).write_bytes(save_tensors(state))
    description = {
        "format": FORMAT,
        "class": next(name for name, kind in READERS.items() if kind is type(reader)),
        "packs": reader.encoder.packs,
        "copies": reader.copy is not None,
        "matches": reader.matches is not None,
        "span_width": None if reader.spans is None else reader.spans.start.out_features,
        "span_layer_norm_eps": None if reader.spans is None else reader.spans.norm.eps,
        "vocabulary_hash": text.vocabulary_hash,
    }
    write_json(folder / DESCRIPTION, description)


def load_reader(stage: Path, vocabulary_hash: str) -> Reader:
    folder = stage / READER_FOLDER
    description = read_description(folder, stage, vocabulary_hash)
    if (name := description["class"]) not in READERS:
        raise ValueError(
            f"{folder / DESCRIPTION}: class is {name!r}; allowed: {', '.join(READERS)}; use the version that trained it"
        )
    values, state = read_config(folder), read_weights(folder)
    encoder, head = open_encoder(values, state, str(folder), description["packs"], predicts=True)
    reader = READERS[name](encoder, head, copies=description["copies"], matches=description["matches"])
    if description["span_width"] is not None:
        reader.spans = SpanHead(encoder.width, description["span_width"], description["span_layer_norm_eps"])
    if (own := own_state(reader)).keys():
        state = load_file(folder / OWN_WEIGHTS)
        assert state.keys() == own.keys(), (folder, state.keys() ^ own.keys())
        reader.load_state_dict(state, strict=False)
    return reader


def own_state(reader: Reader) -> dict[str, Tensor]:
    """Copy the parameters that are in no module of transformers."""
    prefixes = tuple(f"{name}." for name, part in reader.named_modules() if isinstance(part, Encoder | MaskedWordHead))
    return {name: tensor for name, tensor in cpu_state(reader).items() if not name.startswith(prefixes)}
