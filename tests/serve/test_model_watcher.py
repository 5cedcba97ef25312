"""The served model is all that makes an answer, of one moment; another one is served when any of it changes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serving import QUESTION, calibration, update, watching
from small_project import QUESTIONS, answered, cli, write_json_lines
from small_world import DOCUMENTS

from realmops import opening
from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.opened_model import Query
from realmops.artifacts import MANIFEST, atomic_folder, read_json, write_json, write_manifest
from realmops.evaluate.predictions import read_results, write_predictions
from realmops.opening import open_run
from realmops.search.exact import ExactIndex
from realmops.serve import model_sources, model_watcher
from realmops.serve.model_sources import RunFolder


def commit(root: Path, change: Callable[[Path, dict[str, Any]], None]) -> None:
    """Put another output of the stage ``finetune`` into place, as the stage does: whole, by a rename."""
    final = root / "models/finetune"
    manifest = read_json(final / MANIFEST)
    fields = {name: manifest[name] for name in ("fingerprint", "sections")}
    with atomic_folder(final, "finetune") as stage:
        shutil.copytree(final, stage, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        change(stage, fields)
        write_manifest(stage, "finetune", **fields)


def recalibrate(folder: Path, _: Any = None, *, threshold: float = 0.25) -> None:
    write_json(folder / "confidence.json", {**read_json(folder / "confidence.json"), "threshold": threshold})


def halve_weights(folder: Path, _: Any = None) -> None:
    path = folder / "reader/model.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def change_mixture(folder: Path, _: Any) -> None:
    model = read_json(folder / "retriever/realmops.json")
    model["mixture"]["reading"] = 0.5
    write_json(folder / "retriever/realmops.json", model)


def change_decoding(_: Path, fields: dict[str, Any]) -> None:
    fields["sections"]["finetune"]["decoding"] = "minimum_risk"


@pytest.mark.parametrize("change", [recalibrate, change_mixture, change_decoding, halve_weights])
def test_a_change_of_anything_that_makes_the_answer_is_served(copy: Path, change: Callable[..., None]) -> None:
    with watching(RunFolder(copy / "root")) as (batcher, watcher):
        before = batcher.served
        commit(copy / "root", lambda folder, fields: None)
        assert not watcher.poll(), "the same files again are no other model"
        commit(copy / "root", change)
        assert watcher.poll()
        assert batcher.served.version != before.version
        assert not watcher.poll()


def test_a_change_of_the_documents_addresses_is_served(copy: Path) -> None:
    """The passages, and so the corpus hash, are the same ones; the citations are not."""
    documents = [{"title": title, "text": text, "url": "https://e.x/1"} for title, text, _ in DOCUMENTS]
    with watching(RunFolder(copy / "root")) as (batcher, watcher):
        write_json_lines(copy / "documents.jsonl", documents)
        result = cli("run", "snapshot", "--force", "--params", copy / "params.yaml", "--root", copy / "root")
        assert (result.exit_code, watcher.poll()) == (0, True), result.output
        [record] = batcher.served.answer([Query(QUESTION)])
        assert record["citations"][0]["uri"] == "https://e.x/1"


def test_a_new_calibration_reaches_an_earlier_update_and_the_next_one(copy: Path) -> None:
    root = copy / "root"
    update(copy, "Anna Berg was born in Bergen.")
    with watching(RunFolder(root)) as (batcher, watcher):
        commit(root, recalibrate)
        assert watcher.poll()
        served = batcher.served
        assert (served.number, served.confidence and served.confidence.threshold) == (1, 0.25)
    update(copy, "Anna Berg was born in Oslo.")
    assert 0.25 in {read_json(path)["threshold"] for path in (root / "updates").glob("*/finetune/confidence.json")}


def test_a_model_that_is_replaced_while_it_is_opened_is_not_mixed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real, changes = copy / "root", opening.load_retriever, [1]

    def load(*args: Any) -> Any:
        retriever = real(*args)
        if changes:
            commit(root, lambda folder, fields: (halve_weights(folder), recalibrate(folder, threshold=changes.pop())))
        return retriever

    monkeypatch.setattr(opening, "load_retriever", load)
    opened, alone = open_run(root), open_run(root)
    assert (opened.content, changes) == (alone.content, [])
    assert opened.answer([Query(QUESTION)]) == alone.answer([Query(QUESTION)])
    with watching(RunFolder(root)) as (_, watcher):
        changes += [0.5, 0.6, 0.7]
        commit(root, recalibrate)
        assert not watcher.poll()
        assert watcher.refused is not None
        assert "were replaced 3 times while they were read" in watcher.refused["reason"]
        assert (watcher.poll(), watcher.refused) == (True, None)


def test_a_rejected_model_is_opened_again_a_minute_later(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needed too much memory, for example, may be served without a change of its files."""
    now, opened = [0.0], []
    monkeypatch.setattr(model_watcher.time, "monotonic", lambda: now[0])
    with watching(RunFolder(copy / "root")) as (_, watcher):
        real = open_run

        def failing(root: Path) -> Any:
            opened.append(now[0])
            if len(opened) == 1:
                raise MemoryError("out of memory")
            return real(root)

        monkeypatch.setattr(model_sources, "open_run", failing)
        commit(copy / "root", recalibrate)
        assert not watcher.poll()
        assert watcher.refused is not None
        now[0] = model_watcher.RETRY_SECONDS - 1
        assert not watcher.poll()
        assert opened == [0.0]
        now[0] = model_watcher.RETRY_SECONDS
        assert (watcher.poll(), watcher.refused) == (True, None)


def test_a_served_model_has_a_copy_of_the_index_and_answers_the_same(copy: Path) -> None:
    source, asked = RunFolder(copy / "root"), [Query(QUESTION)]
    plain = source.open()
    [expected] = plain.answer(asked)
    with watching(source) as (batcher, watcher):
        commit(copy / "root", recalibrate)
        assert watcher.poll()
        index, before = batcher.served.model.passages, plain.model.passages
        assert isinstance(index, ExactIndex)
        assert isinstance(before, ExactIndex)
        assert (index.use_int8, before.use_int8) == (True, False)
        assert {"int8_copy", "bf16_copy"} <= vars(index).keys(), "no request waits for a copy"
        assert batcher.served.passage_search.passages is index, "one copy serves answers and searches"
        [record] = batcher.served.answer(asked)
        assert (record["answer"], record["score"]) == (expected["answer"], expected["score"])


def test_examples_are_correct_answers_of_people_that_are_not_held_back(copy: Path, tmp_path: Path) -> None:
    root, source = copy / "root", RunFolder(copy / "root")
    answered(root / "results", len(QUESTIONS["test"]))  # as if all were right
    first, second = read_results(root)
    for examples, rows in (
        ([first.question], [first, replace(second, em=False)]),
        ([second.question], [replace(first, em=None, f1=None, failed_at=None), second]),
        ([], [replace(first, abstained=True), replace(second, em=False)]),
        ([first.question, second.question], [first, second]),
    ):
        write_predictions(root / "results/predictions.parquet", rows)
        assert (source.examples(), RunFolder(tmp_path).examples()) == (examples, ())
    replace(calibration(0.0), threshold=ALWAYS_ABSTAIN).save(root / "models/finetune")
    assert source.examples() == [], "the model was calibrated again"
