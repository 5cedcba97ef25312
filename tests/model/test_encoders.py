"""Encoders of others: what a folder must hold, weights in both forms, pickles that are none, and tokenizers."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from small_project import Quiet, run_all_here, stage, toy_values, write_project
from small_world import at_once, section
from transformers import BertTokenizerFast

from realmops.corpus.encoder_tokenizer import read_encoder_vocabulary
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS, Casing, build_tokenizer, vocabulary_bytes
from realmops.hub import (
    BERT,
    T5,
    ModelFamily,
    encoder_files,
    encoder_folder,
    read_weights,
    sentence_pooling,
    unused_modules,
)
from realmops.model.build import build_models
from realmops.model.encoder_files import build_small_encoder, encoder_from_description, load_encoder, save_encoder
from realmops.model.retriever import Embedder, initialise_projection
from realmops.stages import check_inputs

CASED = [*SPECIAL_TOKENS, "Oslo", "oslo", "Z", "##ü", "##rich", "z", "##u", "a", "in", "is", "##n", ".", "B", "b"]


def write_encoder(folder: Path, pieces: list[str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pieces = pieces or [*SPECIAL_TOKENS, *(f"w{n}" for n in range(35))]
    options = section("bert", width=8, layers=1, heads=2, positions=512, dropout=0.0)
    save_encoder(folder, *build_small_encoder(options, len(pieces), torch.Generator().manual_seed(0)))
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(pieces))
    return folder


def test_threads_that_build_at_once_initialise_and_leave_torch_as_it_was(tmp_path: Path) -> None:
    """transformers replaces torch's functions while it builds a model, and puts back what it found."""
    folder, functions = write_encoder(tmp_path / "encoder"), dict(vars(torch.nn.init))
    options = section("bert", width=8, layers=1, heads=2, positions=64, dropout=0.0)

    def build() -> Any:
        return build_small_encoder(options, 40, torch.Generator().manual_seed(0))[0]

    def build_tower() -> torch.Tensor:
        tower = Embedder(build(), 8, "paper", projection="orthogonal")
        initialise_projection(tower, torch.Generator().manual_seed(0))
        assert tower.projection is not None
        return tower.projection.weight

    alone = build_tower()
    for _ in range(4):
        calls = [partial(load_encoder, folder), build_tower, partial(encoder_from_description, build().describe())]
        found = at_once(*calls * 2)
        assert torch.equal(found[1], alone)
        assert torch.equal(found[4], alone)
        assert dict(vars(torch.nn.init)) == functions


# ---- finding a folder


@pytest.mark.parametrize(
    ("family", "option", "name", "files"),
    [
        (
            BERT,
            "retriever.init",
            "google-bert/bert-base-uncased",
            "model.safetensors or pytorch_model.bin, vocab.txt or tokenizer.json",
        ),
        (
            T5,
            "closed_book.init",
            "google-t5/t5-base",
            "the folder of a T5 has config.json, model.safetensors, tokenizer.json",
        ),
    ],
)
def test_an_encoder_that_cannot_be_had_says_what_to_fetch_and_where_to_put_it(
    tmp_path: Path, family: ModelFamily, option: str, name: str, files: str
) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match=rf"{option} is '{name}': no such folder") as error:
        encoder_folder(name, family)
    for words in (
        f"hf download {name} --local-dir {name.split('/')[1]}",
        f"set {option} to its path",
        files,
        f"{option}=small",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=rf"{option} is '.*/not/there': no such folder"):
        encoder_folder(str(tmp_path / "not" / "there"), family)


def test_a_copy_in_the_hubs_cache_is_taken_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name, commit = "some/encoder", "0" * 40
    repository = tmp_path / "models--some--encoder"
    folder = write_encoder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _cached(tmp_path))
    assert encoder_folder(name) == folder
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"the download failed|lacks vocab\.txt or tokenizer\.json"):
        encoder_folder(name)


def _cached(cache: Path) -> Any:
    from huggingface_hub import snapshot_download

    return lambda *given, **named: snapshot_download(*given, **named, cache_dir=cache)


def test_an_incomplete_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    missing = r"lacks model\.safetensors or pytorch_model\.bin, vocab\.txt or tokenizer\.json; the folder of a BERT"
    with pytest.raises(ValueError, match=missing):
        encoder_folder(str(tmp_path))
    for name in ("pytorch_model.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    assert encoder_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_the_hub_is_asked_for_what_is_read_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also for how a sentence encoder pools, which lies in a folder of its own."""
    published = write_encoder(tmp_path / "published")
    write_pooling(published, pooling_mode_mean_tokens=True)
    (published / "modules.json").write_text("[]")
    for name in ("README.md", "openvino_model.bin", "model.onnx", "2_Other/model.safetensors"):
        (published / name).parent.mkdir(exist_ok=True)
        (published / name).write_bytes(b"large")
    if form == "bin":
        as_bin(published)

    def download(name: str, *, local_files_only: bool = False, allow_patterns: Any = None) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing there")
        files = [path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(published / file, tmp_path / "copy" / file)
        return str(tmp_path / "copy")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = encoder_folder("some/encoder")
    copied = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    weights = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[form]
    assert copied == {"config.json", "vocab.txt", "1_Pooling/config.json", "modules.json", weights}
    assert sentence_pooling(folder) == "mean"


# ---- sentence encoders


def write_pooling(folder: Path, **values: Any) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 8, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_a_sentence_encoder_says_how_it_pools(tmp_path: Path, values: dict[str, Any], pooling: str) -> None:
    write_pooling(tmp_path, **values)
    assert sentence_pooling(tmp_path) == pooling


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
def test_another_pooling_is_an_error_that_names_the_file(tmp_path: Path, values: dict[str, Any], found: str) -> None:
    folder = write_pooling(write_encoder(tmp_path), **values)
    message = rf"1_Pooling/config\.json: pooling mode is {found}; .*set retriever\.pooling to cls"
    with pytest.raises(ValueError, match=message):
        built(folder)
    assert built(folder, pooling="mean").pooling == "mean", "the option has the last word"


def test_a_damaged_pooling_is_named(tmp_path: Path) -> None:
    folder = write_pooling(write_encoder(tmp_path))
    (folder / "1_Pooling/config.json").write_text("{")
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json is not valid JSON"):
        built(folder)


def built(folder: Path, **changes: Any) -> Embedder:
    pieces = len((folder / "vocab.txt").read_text().splitlines())
    options = section("retriever", init=str(folder), **changes)
    retriever, _ = build_models(section("bert"), options, section("reader"), pieces, 0)
    assert isinstance(retriever.query, Embedder)
    return retriever.query


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_auto_is_what_the_folder_says_and_options_come_first(tmp_path: Path, mode: str) -> None:
    folder = write_encoder(tmp_path)
    tower = built(folder)
    assert (tower.pooling, tower.segments) == ("cls", "two")
    write_pooling(folder, pooling_mode=mode)
    tower = built(folder)
    assert (tower.pooling, tower.segments) == (mode, "one")
    tower = built(folder, pooling="cls")
    assert (tower.pooling, tower.segments) == ("cls", "one")
    assert built(folder, head="release").pooling == "cls", "the pooler of the released code reads [CLS]"


def test_modules_that_are_not_used_are_told(tmp_path: Path) -> None:
    folder = write_pooling(write_encoder(tmp_path), pooling_mode="cls")
    names = ["Transformer", "Pooling", "LSTM", "Normalize"]
    modules = [{"idx": n, "type": f"sentence_transformers.models.{name}"} for n, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert unused_modules(folder) == ["LSTM"]
    warned: list[str] = []
    build_models(section("bert"), section("retriever", init=str(folder)), section("reader"), 40, 0, warned.append)
    assert any("modules.json names LSTM, which is ignored" in warning for warning in warned)
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    warned.clear()
    build_models(section("bert"), section("retriever", init=str(folder)), section("reader"), 40, 0, warned.append)
    assert not warned
    (folder / "modules.json").write_text("{}x")
    with pytest.raises(ValueError, match=r"modules\.json is not a list of a sentence encoder's modules"):
        unused_modules(folder)


def test_an_encoder_depends_on_how_it_pools(tmp_path: Path) -> None:
    """Another pooling under the same name is another start: the stage runs again."""
    folder = write_pooling(write_encoder(tmp_path), pooling_mode="cls")
    files = encoder_files(str(folder))
    assert files["1_Pooling/config.json"] == folder / "1_Pooling/config.json"
    assert files["config.json"] == folder / "config.json"


# ---- weights


def as_bin(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights in torch's form instead."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


class Payload:
    """Unpickled by the ordinary loader, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "it ran"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, inside: bool) -> None:
    folder, target = write_encoder(tmp_path / "encoder"), tmp_path / "proof"
    weights = as_bin(folder)
    payload = Payload(target)
    torch.save({**weights, "extra": payload} if inside else payload, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*not a weights file.* none of it was"):
        load_encoder(folder)
    assert not target.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert target.read_text() == "it ran", "the payload is a live one"


def test_torchs_old_form_is_refused_unread(tmp_path: Path) -> None:
    folder, target = write_encoder(tmp_path / "encoder"), tmp_path / "proof"
    as_bin(folder)
    torch.save(Payload(target), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged.* none of it was executed"):
        load_encoder(folder)
    assert not target.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {1: torch.zeros(1)}, torch.zeros(2)])
def test_a_bin_file_without_named_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    folder = write_encoder(tmp_path)
    as_bin(folder)
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a mapping from names to tensors"):
        read_weights(folder)


def test_a_damaged_bin_file_is_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    as_bin(folder)
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
        read_weights(folder)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "no weights")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is .*not a weights file"):
        read_weights(folder)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_in_several_files(tmp_path: Path, form: str) -> None:
    folder = write_encoder(tmp_path)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if form == "safetensors" else "pytorch_model"
    names = sorted(whole)
    halves = {f"{stem}-0000{n}-of-00002.{form}": names[n - 1 :: 2] for n in (1, 2)}
    for file, mine in halves.items():
        (save_file if form == "safetensors" else torch.save)({name: whole[name] for name in mine}, folder / file)
    index = folder / f"{stem}.{form}.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, mine in halves.items() for name in mine}}))
    found = read_weights(folder)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in names)
    assert {path.name for path in encoder_files(str(folder)).values()} >= {*halves, index.name, "vocab.txt"}
    (folder / min(halves)).unlink()
    with pytest.raises(ValueError, match=rf"{min(halves)} is missing \(listed in {index.name}\); download it too"):
        read_weights(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.pkl"])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"index\.json: '.*' is not a weights file"):
        read_weights(tmp_path)


# ---- tokenizers


def casing_of(folder: Path, **files: Any) -> Casing:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_encoder_vocabulary(folder)[1]


def test_who_decides_on_the_casing(tmp_path: Path) -> None:
    """tokenizer_config.json, then the normaliser of tokenizer.json, then whether the vocabulary has capitals."""
    (tmp_path / "vocab.txt").write_bytes(vocabulary_bytes(CASED))
    assert casing_of(tmp_path) == Casing(False, False)
    (tmp_path / "vocab.txt").write_bytes(vocabulary_bytes([*SPECIAL_TOKENS, "[unused0]", "oslo"]))
    assert casing_of(tmp_path) == Casing(True, True)
    normaliser = {"type": "BertNormalizer", "lowercase": False, "strip_accents": None}
    assert casing_of(tmp_path, tokenizer={"normalizer": normaliser}) == Casing(False, False)
    config = {"do_lower_case": True, "strip_accents": False}
    assert casing_of(tmp_path, tokenizer_config=config) == Casing(True, False)
    with pytest.raises(ValueError, match="its tokenizer's do_lower_case is 'yes'; expected true or false"):
        casing_of(tmp_path, tokenizer_config={"do_lower_case": "yes"})


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("with_text_file", [True, False])
def test_the_tokenizer_is_transformers_bert_tokenizer(tmp_path: Path, lowercase: bool, with_text_file: bool) -> None:
    """On one text with capitals and accents; the files are as transformers saves them."""
    (tmp_path / "given.txt").write_bytes(vocabulary_bytes(CASED))
    theirs = BertTokenizerFast(str(tmp_path / "given.txt"), do_lower_case=lowercase)
    theirs.save_pretrained(tmp_path / "saved")
    folder = tmp_path / "saved"
    (folder / "vocab.txt").unlink(missing_ok=True)
    if with_text_file:
        (folder / "vocab.txt").write_bytes(vocabulary_bytes(CASED))
    pieces, casing = read_encoder_vocabulary(folder)
    assert pieces == CASED
    ours = build_tokenizer(pieces, casing)
    text = "Oslo is in Zürich. a B"
    found = ours.encode(text, add_special_tokens=False)
    reference = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    assert found.ids == reference["input_ids"]
    assert found.offsets == [tuple(pair) for pair in reference["offset_mapping"]]
    assert ("Oslo" in found.tokens) is not lowercase
    assert ("B" in found.tokens) is not lowercase


def test_a_tokenizer_that_is_not_berts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: its model is 'BPE'; only BERT's WordPiece can be used"):
        read_encoder_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 2}}}))
    with pytest.raises(ValueError, match=r"the ids of its vocabulary are not 0 to 1"):
        read_encoder_vocabulary(tmp_path)


# ---- in the stages


def pieces_of_toy() -> list[str]:
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    capitals = [letter.upper() for letter in letters]
    digits = [str(n) for n in range(10)]
    characters = [*letters, *capitals, *digits]
    return [*SPECIAL_TOKENS, "Oslo", ".", *characters, *(f"##{c}" for c in characters)]


def test_a_cased_encoder_goes_from_text_to_answers(tmp_path: Path) -> None:
    """Passages keep their capitals, questions are matched with and without them."""
    write_project(tmp_path)
    write_encoder(tmp_path / "cased", pieces_of_toy())
    values = toy_values(
        retriever={"init": str(tmp_path / "cased")},
        pretrain={"steps": 0, "builder": "external"},
        snapshot={"workers": 2},
    )
    report = Quiet()
    for name in ("snapshot", "tag", "ict", "pretrain", "finetune", "evaluate"):
        metrics = stage(name, values, tmp_path, tmp_path / "root", report)
    assert 0 <= metrics["em"] <= 1
    snapshot = Snapshot.open(tmp_path / "root" / "data" / "snapshot" / "corpus")
    assert snapshot.casing == Casing(lowercase=False, strip_accents=False)
    titles = {snapshot.title(n): snapshot.title_tokens(n) for n in range(len(snapshot))}
    assert [snapshot.vocabulary[i] for i in titles["Oslo"]] == ["Oslo"]
    assert not report.warned, "the encoder has its head"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("weights", "lacks model.safetensors or pytorch_model.bin"),
        ("header", "model.safetensors is damaged"),
        ("architecture", "model_type 'vit' is no"),
        ("tokenizer", "lacks vocab.txt or tokenizer.json"),
        ("width", "retriever.projection is pca, and retriever.embedding_width is 4096"),
    ],
)
def test_an_encoder_is_opened_before_the_first_stage(
    broken: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And question files are read once, not before each stage that reads them."""
    folder = write_encoder(tmp_path / "encoder", pieces_of_toy())
    width = 4096 if broken == "width" else 8
    write_project(tmp_path, retriever={"init": str(folder), "projection": "pca", "embedding_width": width})
    config = json.loads((folder / "config.json").read_text())
    match broken:
        case "weights":
            (folder / "model.safetensors").unlink()
        case "header":
            (folder / "model.safetensors").write_bytes(b"no weights")
        case "architecture":
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
        case "tokenizer":
            for name in ("vocab.txt", "tokenizer.json"):
                (folder / name).unlink(missing_ok=True)
    read: list[Path] = []
    usual = check_inputs.read_questions

    def reading(paths: list[Path], **named: Any) -> Any:
        read.extend(paths)
        return usual(paths, **named)

    monkeypatch.setattr(check_inputs, "read_questions", reading)
    with pytest.raises(ValueError, match=re.escape(says)):
        run_all_here(tmp_path / "params.yaml", tmp_path / "root")
    assert not (tmp_path / "root" / "data").exists(), "no stage began"
    assert sorted(path.name for path in read) == [f"questions.{split}.jsonl" for split in ("dev", "test", "train")]


def test_other_weights_under_the_same_name_run_again(tmp_path: Path) -> None:
    write_project(tmp_path)
    folder = write_encoder(tmp_path / "encoder", [p for p in pieces_of_toy() if p == p.lower() or p.startswith("[")])
    values = toy_values(retriever={"init": str(folder)})
    root = tmp_path / "root"

    def ran(name: str) -> bool:
        report = Quiet()
        stage(name, values, tmp_path, root, report)
        return not any("nothing to do" in line for line in report.said)

    assert [ran(name) for name in ("snapshot", "tag", "ict")] == [True, True, True]
    assert [ran(name) for name in ("snapshot", "tag", "ict")] == [False, False, False]
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"] += 1
    save_file(weights, folder / "model.safetensors")
    assert ran("ict")


FIRST_USE = """
import threading
from realmops.model.transformers_models import import_transformers

barrier, opened = threading.Barrier(8), []

def use() -> None:
    barrier.wait()
    opened.append(import_transformers().AutoConfig.for_model("bert"))

threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(opened) == 8
"""


def test_threads_import_transformers_at_once() -> None:
    """In a new process, as a server that opens its models in threads."""
    result = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
