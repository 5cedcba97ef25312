"""Folders of pre-trained models: found or downloaded, weights in both formats, no pickle runs, pooling, casing."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from small_world import section
from transformers import BertTokenizerFast

from realmops.corpus.encoder_tokenizer import read_encoder_vocabulary
from realmops.corpus.vocabulary import SPECIAL_TOKENS, Casing, build_tokenizer, vocabulary_bytes
from realmops.hub import BERT, T5, ModelFamily, encoder_files, encoder_folder, read_weights, sentence_pooling
from realmops.model.build import build_models
from realmops.model.encoder_files import build_small_encoder, load_encoder, save_encoder
from realmops.model.retriever import Embedder

CASED = [*SPECIAL_TOKENS, "Oslo", "oslo", "Z", "##ü", "##rich", "z", "##u", "a", "in", "is", "##n", ".", "B", "b"]
PIECES = [*SPECIAL_TOKENS, *(f"w{n}" for n in range(35))]


def write_encoder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    options = section("bert", width=8, layers=1, heads=2, positions=512, dropout=0.0)
    save_encoder(folder, *build_small_encoder(options, len(PIECES), torch.Generator().manual_seed(0)))
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(PIECES))
    return folder


def write_pooling(folder: Path, **values: Any) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 8, **values}))
    return folder


def to_bin(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the weights of a folder by torch's format."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


# ---- folders


@pytest.mark.parametrize(
    ("family", "name", "files"),
    [
        (BERT, "google-bert/bert-base-uncased", "model.safetensors or pytorch_model.bin, vocab.txt or tokenizer.json"),
        (T5, "google-t5/t5-base", "the folder of a T5 has config.json, model.safetensors, tokenizer.json"),
    ],
)
def test_a_missing_model_is_reported_with_what_to_download(family: ModelFamily, name: str, files: str) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match=rf"{family.option} is '{name}': no such folder") as error:
        encoder_folder(name, family)
    target = name.split("/")[1]
    for words in (f"hf download {name} --local-dir {target}", f"set {family.option} to its path", files, "=small"):
        assert words in str(error.value)


def test_a_copy_in_the_hubs_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    def cached(*given: Any, **named: Any) -> str:
        return snapshot_download(*given, **named, cache_dir=tmp_path)

    repository = tmp_path / "models--some--encoder"
    folder = write_encoder(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert encoder_folder("some/encoder") == folder
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"the download failed|lacks vocab\.txt or tokenizer\.json"):
        encoder_folder("some/encoder")


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    missing = r"lacks model\.safetensors or pytorch_model\.bin, vocab\.txt or tokenizer\.json; the folder of a BERT"
    with pytest.raises(ValueError, match=missing):
        encoder_folder(str(tmp_path))
    for name in ("pytorch_model.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    assert encoder_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_files_that_are_read_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    published = write_pooling(write_encoder(tmp_path / "published"), pooling_mode_mean_tokens=True)
    (published / "modules.json").write_text("[]")
    for name in ("README.md", "openvino_model.bin", "model.onnx", "2_Other/model.safetensors"):
        (published / name).parent.mkdir(exist_ok=True)
        (published / name).write_bytes(b"large")
    if weights == "pytorch_model.bin":
        to_bin(published)

    def download(name: str, *, local_files_only: bool = False, allow_patterns: Any = None) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("empty cache")
        files = [path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(published / file, tmp_path / "copy" / file)
        return str(tmp_path / "copy")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = encoder_folder("some/encoder")
    copied = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert copied == {"config.json", "vocab.txt", "1_Pooling/config.json", "modules.json", weights}
    assert encoder_files(str(folder)).keys() == copied


# ---- pooling of sentence encoders


def build_tower(folder: Path, warn: Any = None, **changes: Any) -> Embedder:
    options = section("retriever", init=str(folder), **changes)
    retriever, _ = build_models(section("bert"), options, section("reader"), len(PIECES), 0, warn)
    assert isinstance(retriever.query, Embedder)
    return retriever.query


@pytest.mark.parametrize(
    ("values", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
    ],
)
def test_pooling_is_read_from_the_folder(tmp_path: Path, values: dict[str, Any], pooling: str) -> None:
    assert sentence_pooling(write_pooling(tmp_path, **values)) == pooling


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls, mean"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["mean", "max"]}, "mean, max"),
        ({}, "missing"),
    ],
)
def test_an_unsupported_pooling_is_refused_unless_an_option_replaces_it(
    tmp_path: Path, values: dict[str, Any], found: str
) -> None:
    folder = write_pooling(write_encoder(tmp_path), **values)
    message = rf"1_Pooling/config\.json: pooling mode is {found}; .*set retriever\.pooling to cls"
    with pytest.raises(ValueError, match=message):
        build_tower(folder)
    assert build_tower(folder, pooling="mean").pooling == "mean"


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_auto_is_the_folders_pooling_and_options_override_it(tmp_path: Path, mode: str) -> None:
    folder = write_encoder(tmp_path)
    assert (build_tower(folder).pooling, build_tower(folder).segments) == ("cls", "two")
    write_pooling(folder, pooling_mode=mode)
    assert (build_tower(folder).pooling, build_tower(folder).segments) == (mode, "one")
    assert build_tower(folder, pooling="cls").pooling == "cls"
    assert build_tower(folder, head="release").pooling == "cls", "the release's pooler reads [CLS]"


def test_ignored_modules_are_reported(tmp_path: Path) -> None:
    folder, warnings = write_pooling(write_encoder(tmp_path), pooling_mode="cls"), list[str]()
    names = ["Transformer", "Pooling", "Normalize", "LSTM"]
    modules = [{"idx": n, "type": f"sentence_transformers.models.{name}"} for n, name in enumerate(names)]
    for used in (modules[:3], modules):
        (folder / "modules.json").write_text(json.dumps(used))
        build_tower(folder, warnings.append)
    [warning] = warnings
    assert "modules.json names LSTM, which is ignored" in warning
    (folder / "modules.json").write_text("{}x")
    with pytest.raises(ValueError, match=r"modules\.json is not a list of a sentence encoder's modules"):
        build_tower(folder)


# ---- weights


class Payload:
    """Unpickled by the ordinary loader, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "it ran"))


@pytest.mark.parametrize("form", ["alone", "with weights", "legacy"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, form: str) -> None:
    folder, target = write_encoder(tmp_path / "encoder"), tmp_path / "proof"
    weights, payload = to_bin(folder), Payload(target)
    content = {**weights, "extra": payload} if form == "with weights" else payload
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form != "legacy")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged.* none of it was executed"):
        load_encoder(folder)
    assert not target.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert target.read_text() == "it ran", "the payload works"


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {1: torch.zeros(1)}, torch.zeros(2)])
def test_a_bin_file_without_named_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a mapping from names to tensors"):
        read_weights(tmp_path)


def test_a_damaged_bin_file_is_refused(tmp_path: Path) -> None:
    path = write_encoder(tmp_path) / "pytorch_model.bin"
    to_bin(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
        read_weights(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "no weights")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is .*not a weights file"):
        read_weights(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_in_several_files_are_joined(tmp_path: Path, form: str) -> None:
    folder = write_encoder(tmp_path)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, names = "model" if form == "safetensors" else "pytorch_model", sorted(whole)
    shards = {f"{stem}-0000{n}-of-00002.{form}": names[n - 1 :: 2] for n in (1, 2)}
    for file, kept in shards.items():
        (save_file if form == "safetensors" else torch.save)({name: whole[name] for name in kept}, folder / file)
    index = folder / f"{stem}.{form}.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, kept in shards.items() for name in kept}}))
    weights = read_weights(folder)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in names)
    assert {path.name for path in encoder_files(str(folder)).values()} >= {*shards, index.name, "vocab.txt"}
    (folder / min(shards)).unlink()
    with pytest.raises(ValueError, match=rf"{min(shards)} is missing \(listed in {index.name}\); download it too"):
        read_weights(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.pkl"])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"index\.json: '.*' is not a weights file"):
        read_weights(tmp_path)


# ---- BERT's tokenizers


def test_casing_is_that_of_the_configuration_or_of_the_vocabulary(tmp_path: Path) -> None:
    """tokenizer_config.json, then the normaliser of tokenizer.json, then whether the vocabulary has capitals."""

    def casing(**files: Any) -> Casing:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return read_encoder_vocabulary(tmp_path)[1]

    (tmp_path / "vocab.txt").write_bytes(vocabulary_bytes(CASED))
    assert casing() == Casing(False, False)
    (tmp_path / "vocab.txt").write_bytes(vocabulary_bytes([*SPECIAL_TOKENS, "[unused0]", "oslo"]))
    assert casing() == Casing(True, True)
    normaliser = {"type": "BertNormalizer", "lowercase": False, "strip_accents": None}
    assert casing(tokenizer={"normalizer": normaliser}) == Casing(False, False)
    assert casing(tokenizer_config={"do_lower_case": True, "strip_accents": False}) == Casing(True, False)
    with pytest.raises(ValueError, match="its tokenizer's do_lower_case is 'yes'; expected true or false"):
        casing(tokenizer_config={"do_lower_case": "yes"})


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("has_text_file", [True, False])
def test_the_tokenizer_equals_that_of_transformers(tmp_path: Path, lowercase: bool, has_text_file: bool) -> None:
    (tmp_path / "given.txt").write_bytes(vocabulary_bytes(CASED))
    peer, folder = BertTokenizerFast(str(tmp_path / "given.txt"), do_lower_case=lowercase), tmp_path / "saved"
    peer.save_pretrained(folder)
    (folder / "vocab.txt").unlink(missing_ok=True)
    if has_text_file:
        (folder / "vocab.txt").write_bytes(vocabulary_bytes(CASED))
    pieces, casing = read_encoder_vocabulary(folder)
    assert pieces == CASED
    text = "Oslo is in Zürich. a B"
    encoded = build_tokenizer(pieces, casing).encode(text, add_special_tokens=False)
    reference = peer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded.ids == reference["input_ids"]
    assert encoded.offsets == [tuple(pair) for pair in reference["offset_mapping"]]
    assert ("Oslo" in encoded.tokens) is not lowercase


def test_a_tokenizer_that_is_not_berts_is_refused(tmp_path: Path) -> None:
    for model, message in (
        ({"type": "BPE", "vocab": {"a": 0}}, r"tokenizer\.json: its model is 'BPE'; only BERT's WordPiece can be used"),
        ({"type": "WordPiece", "vocab": {"a": 0, "b": 2}}, r"the ids of its vocabulary are not 0 to 1"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        with pytest.raises(ValueError, match=message):
            read_encoder_vocabulary(tmp_path)
