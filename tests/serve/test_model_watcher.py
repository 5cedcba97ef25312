"""What a served model is: everything that makes an answer, all of one moment, and taken over when any of it changes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serving import QUESTION, update
from small_project import cli, write_json_lines
from small_world import DOCUMENTS

from realmops.answering import opening
from realmops.answering.opened_model import Query
from realmops.answering.opening import manifest_stats
from realmops.artifacts import MANIFEST, atomic_folder, read_json, write_json, write_manifest
from realmops.commands.open_model import open_run
from realmops.search.exact import ExactIndex
from realmops.serve import model_watcher, served_model
from realmops.serve.batching import RequestBatcher
from realmops.serve.model_watcher import ModelWatcher
from realmops.serve.served_model import RunFolder, ServedModel


def commit(root: Path, change: Callable[[Path, dict[str, Any]], None]) -> None:
    """Put another output of the stage ``finetune`` into place, as the stage does: whole, by a rename."""
    final = root / "models/finetune"
    manifest = read_json(final / MANIFEST)
    fields = {name: manifest[name] for name in ("fingerprint", "sections")}
    with atomic_folder(final) as stage:
        shutil.copytree(final, stage, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        change(stage, fields)
        write_manifest(stage, "finetune", **fields)


def recalibrate(folder: Path, _: Any = None, *, threshold: float = 0.25) -> None:
    write_json(folder / "confidence.json", {**read_json(folder / "confidence.json"), "threshold": threshold})


def weigh(folder: Path, _: Any = None) -> None:
    """Another reader, by its weights."""
    path = folder / "reader/model.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def remix(folder: Path, _: Any) -> None:
    model = read_json(folder / "retriever/realmops.json")
    model["mixture"]["reading"] = 0.5
    write_json(folder / "retriever/realmops.json", model)


def decode(_: Path, fields: dict[str, Any]) -> None:
    fields["sections"]["finetune"]["decoding"] = "minimum_risk"


def watcher_of(source: RunFolder) -> ModelWatcher:
    mark = source.mark()
    return ModelWatcher(source, RequestBatcher(ServedModel.of(source.open())), mark, lambda served: None)


@pytest.mark.parametrize("change", [recalibrate, remix, decode, weigh])
def test_whatever_makes_the_answer_takes_over(copy: Path, change: Callable[..., None]) -> None:
    watcher = watcher_of(RunFolder(copy / "root"))
    before = watcher._batcher.served
    commit(copy / "root", lambda folder, fields: None)
    assert not watcher.poll(), "the same files again are no other generation"
    commit(copy / "root", change)
    assert watcher.poll()
    after = watcher._batcher.served
    assert after.version != before.version
    assert not watcher.poll()
    watcher._batcher.close()


def test_documents_that_are_named_otherwise_take_over(copy: Path) -> None:
    """The passages, and so the corpus hash, are the same ones; the citations are not."""
    watcher = watcher_of(RunFolder(copy / "root"))
    write_json_lines(
        copy / "documents.jsonl",
        [{"title": title, "text": text, "url": "https://e.x/1"} for title, text, _ in DOCUMENTS],
    )
    where = ("--params", copy / "params.yaml", "--root", copy / "root")
    assert cli("run", "snapshot", "--force", *where).exit_code == 0
    assert watcher.poll()
    [record] = watcher._batcher.served.answer([Query(QUESTION)])
    assert record["citations"][0]["uri"] == "https://e.x/1"
    watcher._batcher.close()


def test_a_new_calibration_reaches_an_earlier_update_and_the_next_one(copy: Path) -> None:
    root = copy / "root"
    update(copy, "Anna Berg was born in Bergen.")
    watcher = watcher_of(RunFolder(root))
    commit(root, recalibrate)
    assert watcher.poll()
    served = watcher._batcher.served
    assert (served.number, served.confidence and served.confidence.threshold) == (1, 0.25)
    watcher._batcher.close()
    update(copy, "Anna Berg was born in Oslo.")
    found = {read_json(path)["threshold"] for path in (root / "updates").glob("*/finetune/confidence.json")}
    assert 0.25 in found


def test_a_stage_that_is_committed_in_the_middle_is_not_mixed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of before, and all else of after: that was served for good."""
    root, real, swapped = copy / "root", opening.load_retriever, []

    def load(*args: Any) -> Any:
        found = real(*args)
        if not swapped:
            swapped.append(True)
            commit(root, lambda folder, fields: (weigh(folder), recalibrate(folder)))
        return found

    monkeypatch.setattr(opening, "load_retriever", load)
    opened = open_run(root)
    assert swapped
    alone = open_run(root)
    assert opened.content == alone.content
    assert opened.answer([Query(QUESTION)]) == alone.answer([Query(QUESTION)])
    assert all(
        (one == other).all()
        for one, other in zip(opened.model.reader.parameters(), alone.model.reader.parameters(), strict=True)
    )


def test_a_run_that_never_rests_is_refused_and_looked_at_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = copy / "root", opening.load_retriever
    watcher = watcher_of(RunFolder(root))

    def load(*args: Any) -> Any:
        found = real(*args)
        commit(root, lambda folder, fields: recalibrate(folder, threshold=0.5))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(opening, "load_retriever", load)
        commit(root, recalibrate)
        assert not watcher.poll()
        assert watcher.refused is not None
        assert "were replaced 3 times while they were read" in watcher.refused["reason"]
    assert watcher.poll()
    assert watcher.refused is None
    watcher._batcher.close()


def test_a_refused_generation_is_tried_again_unchanged_and_not_at_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed for want of memory, say, is there a minute later; until then it is not opened at every look."""
    now, opened = [0.0], []
    monkeypatch.setattr(model_watcher.time, "monotonic", lambda: now[0])
    watcher = watcher_of(RunFolder(copy / "root"))
    real = open_run

    def failing(root: Path) -> Any:
        opened.append(now[0])
        if len(opened) == 1:
            raise MemoryError("no memory for it")
        return real(root)

    monkeypatch.setattr(served_model, "open_run", failing)
    commit(copy / "root", recalibrate)
    assert not watcher.poll()
    assert watcher.refused is not None
    now[0] = model_watcher.RETRY_SECONDS - 1
    assert not watcher.poll()
    assert opened == [0.0], "not before its time"
    now[0] = model_watcher.RETRY_SECONDS
    assert watcher.poll(), "the same files, tried again"
    assert watcher.refused is None
    watcher._batcher.close()


def test_a_changed_manifest_in_its_place_is_seen(copy: Path) -> None:
    before = manifest_stats(copy / "root")
    path = copy / "root/data/snapshot" / MANIFEST
    os.replace(shutil.copyfile(path, path.with_name(".new")), path)
    assert manifest_stats(copy / "root") != before


def test_a_warmed_up_model_has_a_copy_of_the_index_and_answers_the_same(copy: Path) -> None:
    origin = RunFolder(copy / "root")
    watcher, asked = watcher_of(origin), [Query(QUESTION)]
    plain = origin.open()
    [told] = plain.answer(asked)
    commit(copy / "root", recalibrate)
    assert watcher.poll()
    served = watcher._batcher.served
    index, before = served.model.passages, plain.model.passages
    assert isinstance(index, ExactIndex)
    assert isinstance(before, ExactIndex)
    assert (index.use_int8, before.use_int8) == (True, False)
    assert {"int8_copy", "bf16_copy"} <= vars(index).keys(), "no request waits for a copy"
    assert served.shared_search.passages is index, "one copy serves answers and searches"
    [again] = served.answer(asked)
    assert (again["answer"], again["score"]) == (told["answer"], told["score"])
