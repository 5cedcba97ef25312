"""Files of a model of an unknown kind are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_open_qa import open_qa, options
from small_world import World, section, tiny_models

from realmops import opening
from realmops.model.reader_files import load_models, save_models
from realmops.search import approximate
from realmops.search.embeddings import load_passages, save_passages


def index_files(world: World, folder: Path) -> tuple[Path, Callable[[], object]]:
    embedding_PE = torch.randn(len(world.snapshot), 8, generator=torch.Generator().manual_seed(0))
    wanted = section("index", type="hnsw", target_recall=0.1)
    index = approximate.passage_index(embedding_PE, wanted, torch.device("cpu"), 5, lambda: embedding_PE, 3)
    save_passages(folder, index, world.snapshot.corpus_hash, "")
    return folder / "index.json", lambda: load_passages(folder, world.snapshot, torch.device("cpu"), 1)


def tuned_files(world: World, folder: Path) -> tuple[Path, Callable[[], object]]:
    opening.save_tuned(folder, open_qa(world))
    fp32 = section("run", precision="fp32", device="cpu")
    return folder / opening.KIND, lambda: opening.open_tuned(folder, options(), fp32, world.snapshot)


def reader_files(world: World, folder: Path) -> tuple[Path, Callable[[], object]]:
    save_models(folder, *tiny_models(world), world.text)
    return folder / "reader/realmops.json", lambda: load_models(folder, world.snapshot.vocabulary_hash)


@pytest.mark.parametrize(
    ("write", "key", "message"),
    [
        (index_files, "type", r"index.json: unknown type 'of tomorrow'; .*ivf, pq, hnsw"),
        (tuned_files, "class", r"'of tomorrow', which finetune.reader=pretrain does not have"),
        (reader_files, "class", r"class is 'of tomorrow'; allowed: together, apart"),
    ],
)
def test_an_unknown_kind_is_named(
    world: World,
    tmp_path: Path,
    write: Callable[[World, Path], tuple[Path, Callable[[], object]]],
    key: str,
    message: str,
) -> None:
    path, load = write(world, tmp_path)
    load()
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "of tomorrow"}))
    with pytest.raises(ValueError, match=message):
        load()
