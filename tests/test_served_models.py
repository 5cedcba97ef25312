"""What a generation is: everything that makes an answer, all of one moment, and taken over when any of it changes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import QUESTION, update
from small_project import cli, write_json_lines
from small_world import DOCUMENTS
from torch import nn

from realmops.artifacts import MANIFEST, atomic_folder, read_json, write_json, write_manifest
from realmops.commands import answers
from realmops.search.exact import Exact
from realmops.serve.batching import Answerer
from realmops.serve.served_models import GenerationWatcher, RunFolder


def commit(root: Path, change: Callable[[Path, dict[str, Any]], None]) -> None:
    """Put another output of the stage ``finetune`` into place, as the stage does: whole, by a rename."""
    final = root / "models/finetune"
    manifest = read_json(final / MANIFEST)
    fields = {name: manifest[name] for name in ("fingerprint", "sections")}
    with atomic_folder(final) as stage:
        shutil.copytree(final, stage, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
        change(stage, fields)
        write_manifest(stage, "finetune", **fields)


def recalibrate(folder: Path, _: Any = None, *, threshold: float = 0.25) -> None:
    write_json(folder / "confidence.json", {**read_json(folder / "confidence.json"), "threshold": threshold})


def weigh(folder: Path, _: Any = None) -> None:
    """Another reader, by its weights."""
    from safetensors.torch import load_file, save_file

    path = folder / "reader_encoder/model.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def remix(folder: Path, _: Any) -> None:
    model = read_json(folder / "model.json")
    model["mixture"]["reading"] = 0.5
    write_json(folder / "model.json", model)


def decode(_: Path, fields: dict[str, Any]) -> None:
    fields["sections"]["finetune"]["decoding"] = "minimum_risk"


def keeper_of(origin: RunFolder) -> GenerationWatcher:
    mark = origin.mark()
    return GenerationWatcher(origin, Answerer(origin.open()), mark, lambda generation: None)


@pytest.mark.parametrize("change", [recalibrate, remix, decode, weigh])
def test_whatever_makes_the_answer_takes_over(copy: Path, change: Callable[..., None]) -> None:
    watcher = keeper_of(RunFolder(copy / "root"))
    before = watcher._answerer.generation
    commit(copy / "root", lambda folder, fields: None)
    assert not watcher.look(), "the same files again are no other generation"
    commit(copy / "root", change)
    assert watcher.look()
    after = watcher._answerer.generation
    assert after.version != before.version
    assert not watcher.look()
    watcher._answerer.close()


def test_documents_that_are_named_otherwise_take_over(copy: Path) -> None:
    """The passages, and so the corpus hash, are the same ones; the citations are not."""
    watcher = keeper_of(RunFolder(copy / "root"))
    write_json_lines(
        copy / "documents.jsonl",
        [{"title": title, "text": text, "url": "https://e.x/1"} for title, text, _ in DOCUMENTS],
    )
    where = ("--params", copy / "params.yaml", "--root", copy / "root")
    assert cli("run", "snapshot", "--force", *where).exit_code == 0
    assert watcher.look()
    [record] = watcher._answerer.generation.answer([answers.Asked(QUESTION)])
    assert record["citations"][0]["uri"] == "https://e.x/1"
    watcher._answerer.close()


def test_a_new_calibration_reaches_an_earlier_update_and_the_next_one(copy: Path) -> None:
    root = copy / "root"
    update(copy, "Anna Berg was born in Bergen.")
    watcher = keeper_of(RunFolder(root))
    commit(root, recalibrate)
    assert watcher.look()
    served = watcher._answerer.generation
    assert (served.number, served.confidence and served.confidence.threshold) == (1, 0.25)
    watcher._answerer.close()
    update(copy, "Anna Berg was born in Oslo.")
    found = {read_json(path)["threshold"] for path in (root / "updates").glob("*/finetune/confidence.json")}
    assert 0.25 in found


def test_a_stage_that_is_committed_in_the_middle_is_not_mixed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of before, and all else of after: that was served for good."""
    from realmops.evaluate import tuned

    root, real, swapped = copy / "root", tuned.load_models, []

    def load(*args: Any) -> Any:
        found = real(*args)
        if not swapped:
            swapped.append(True)
            commit(root, lambda folder, fields: (weigh(folder), recalibrate(folder)))
        return found

    monkeypatch.setattr(tuned, "load_models", load)
    opened = answers.generation_of_run(root)
    assert swapped
    alone = answers.generation_of_run(root)
    assert opened.content == alone.content
    assert opened.answer([answers.Asked(QUESTION)]) == alone.answer([answers.Asked(QUESTION)])
    assert all(
        (one == other).all()
        for one, other in zip(opened.model.reader.parameters(), alone.model.reader.parameters(), strict=True)
    )


def test_a_run_that_never_rests_is_refused_and_looked_at_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from realmops.evaluate import tuned

    root, real = copy / "root", tuned.load_models
    watcher = keeper_of(RunFolder(root))

    def load(*args: Any) -> Any:
        found = real(*args)
        commit(root, lambda folder, fields: recalibrate(folder, threshold=0.5))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(tuned, "load_models", load)
        commit(root, recalibrate)
        assert not watcher.look()
        assert watcher.refused is not None
        assert "were replaced 3 times while they were read" in watcher.refused["reason"]
    assert watcher.look()
    assert watcher.refused is None
    watcher._answerer.close()


def test_a_refused_generation_is_tried_again_unchanged_and_not_at_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed for want of memory, say, is there a minute later; until then it is not opened at every look."""
    from realmops.serve import served_models

    now, opened = [0.0], []
    monkeypatch.setattr(served_models.time, "monotonic", lambda: now[0])
    watcher = keeper_of(RunFolder(copy / "root"))
    real = answers.generation_of_run

    def failing(root: Path) -> Any:
        opened.append(now[0])
        if len(opened) == 1:
            raise MemoryError("no memory for it")
        return real(root)

    monkeypatch.setattr(served_models, "generation_of_run", failing)
    commit(copy / "root", recalibrate)
    assert not watcher.look()
    assert watcher.refused is not None
    now[0] = served_models.AGAIN_AFTER - 1
    assert not watcher.look()
    assert opened == [0.0], "not before its time"
    now[0] = served_models.AGAIN_AFTER
    assert watcher.look(), "the same files, tried again"
    assert watcher.refused is None
    watcher._answerer.close()


def test_a_changed_manifest_in_its_place_is_seen(copy: Path) -> None:
    before = answers.manifests_of(copy / "root")
    path = copy / "root/data/snapshot" / MANIFEST
    os.replace(shutil.copyfile(path, path.with_name(".new")), path)
    assert answers.manifests_of(copy / "root") != before


def test_a_served_generation_is_asked_with_copies_and_answers_the_same(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[nn.Module] = []
    monkeypatch.setattr(answers, "with_packed_linears", lambda module, dtype: packed.append(module) or module)
    origin = RunFolder(copy / "root")
    keeper, asked = keeper_of(origin), [answers.Asked(QUESTION)]
    plain = origin.open()
    [told] = plain.answer(asked)
    commit(copy / "root", recalibrate)
    assert keeper.look()
    served = keeper._answerer.generation
    index, before = served.model.passages, plain.model.passages
    assert isinstance(index, Exact)
    assert isinstance(before, Exact)
    assert (index.often, before.often) == (True, False)
    assert served.searching.passages is index, "one copy serves answers and searches"
    assert packed == [served.model.retriever.query, served.model.reader]
    [again] = served.answer(asked)
    assert (again["answer"], again["p_y"]) == (told["answer"], told["p_y"])
