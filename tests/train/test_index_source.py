"""Which weights are published for an index, which index each step adopts, and the memory that a refresh takes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PASSAGES, WIDTH, PART_ROWS = 1 << 17, 128, 1 << 13
COPY = PASSAGES * WIDTH * 4  # 64 MiB: large compared with a part, both models, and what is freed and kept


@pytest.mark.parametrize(
    ("every", "lag", "delay", "generations"),
    [
        (50, 25, 0, {0: 0, 49: 0, 50: 0, 74: 0, 75: 50, 76: 50, 124: 50, 125: 100, 399: 350}),
        (2, 0, 0, dict(enumerate([0, 0, 2, 2, 4]))),
        (2, 5, 0, dict(enumerate([0] * 7 + [2, 2, 4]))),
        (2, 0, 3, dict(enumerate([0, 0, 0, 0, 4]))),
    ],
)
def test_an_index_is_adopted_lag_steps_after_its_weights(
    every: int, lag: int, delay: int, generations: dict[int, int]
) -> None:
    from realmops.refresh.trainer import RefreshPolicy
    from realmops.train.index_source import RefreshSchedule

    refresh = RefreshSchedule(400, every, lag, delay, "external", "auto", 1, RefreshPolicy())
    assert {step: refresh.generation(step) for step in generations} == generations


class SeenTrainer:
    """A trainer's exchange that records which weights were published, and which index was requested at each step."""

    def __init__(self) -> None:
        self.published, self.requested = list[int](), dict[int, int]()
        self.step, self.index_step, self.lacks_index = 0, 0, False

    def beat(self, step: int) -> None:
        self.step = step

    def publish_weights(self, step: int, files: dict[str, bytes], meta: dict[str, Any]) -> None:
        self.published.append(step)

    def index_for(self, step: int) -> Any:
        self.requested[self.step] = self.index_step = step
        return SimpleNamespace(step=step, files={"embeddings.safetensors": b""}, meta={"published": 0.0})


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 4, 5, 20])
def test_the_weights_that_are_published_are_those_whose_index_is_adopted(
    monkeypatch: pytest.MonkeyPatch, every: int, lag: int, delay: int
) -> None:
    """In its first ``delay`` steps the retriever is frozen: the weights of step ``delay`` are those of step 0."""
    import torch

    from realmops.refresh.trainer import RefreshPolicy
    from realmops.train import index_source as module
    from realmops.train.parallel import SINGLE_PROCESS

    monkeypatch.setattr(module, "EMBEDDINGS", "embeddings.safetensors")
    monkeypatch.setattr(module, "retriever_files", lambda *_: {})
    monkeypatch.setattr(module, "view_embeddings", lambda content: None)
    monkeypatch.setattr(module, "retriever_from_files", lambda files: torch.nn.Identity())
    steps, trainer = 12, SeenTrainer()
    refresh = module.RefreshSchedule(steps, every, lag, delay, "external", "auto", 1, RefreshPolicy())
    parts: Any = (trainer, refresh, "", torch.device("cpu"), SINGLE_PROCESS, lambda *_: None)
    source, retriever = module.ExchangeSource(*parts), torch.nn.Identity()
    new = [bool((index := source.at_step(step, retriever)) and index.new) for step in range(steps)]  # type: ignore[arg-type]
    built = [s if s > delay else 0 for s in range(0, steps, every)]  # the index of step s is built from these weights
    due = [max([0] + [built[i] for i, s in enumerate(range(0, steps, every)) if s + lag <= t]) for t in range(steps)]
    first = [t for t in range(steps) if t == 0 or due[t] != due[t - 1]]
    assert trainer.requested == {t: due[t] for t in first}
    assert [t for t in range(steps) if new[t]] == first
    assert trainer.published == sorted({*due})


def test_a_builder_holds_less_than_the_index_and_a_trainer_two_generations(tmp_path: Path) -> None:
    """Measured in a process of its own, which runs ``main`` of this file."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert [what for what, _ in rows] == ["build", "build", "adopt", "adopt with another"]
    assert all(copies < 1 for what, copies in rows if what == "build"), rows  # the matrix is mapped, and let go
    assert all(0.9 < copies < 1.3 for what, copies in rows if what.startswith("adopt")), rows


def anonymous() -> int:
    """Bytes that this process holds itself. Pages of mapped files do not count: the kernel may drop them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measured(what: str, work: Callable[[], Any]) -> Any:
    """Return ``work()``; print the copies of the embeddings by which the process grew at most, checked every 0.5 ms."""
    before, done = anonymous(), threading.Event()
    seen = [before]

    def watch() -> None:
        while not done.wait(0.0005):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    print(json.dumps([what, (max(*seen, anonymous()) - before) / COPY]), flush=True)
    return result


def main(folder: Path) -> None:
    """A trainer and, in forked processes, builders; passages are embedded as the step of the weights and 1."""
    import torch
    from exchange_lab import end_of, forked
    from safetensors.torch import save
    from small_world import section

    from realmops.corpus.vocabulary import build_tokenizer
    from realmops.model.build import build_models
    from realmops.model.retriever_files import TextFormat, retriever_files
    from realmops.process import configure_malloc
    from realmops.refresh.builder import Builder, BuilderWork
    from realmops.refresh.builder_process import merge
    from realmops.refresh.exchange import Exchange
    from realmops.refresh.trainer import RefreshPolicy, TrainerSide
    from realmops.search.embeddings import EMBEDDINGS
    from realmops.search.exact import ExactIndex
    from realmops.train.index_source import ExchangeSource, RefreshSchedule
    from realmops.train.parallel import SINGLE_PROCESS

    configure_malloc()
    card = {"passages": PASSAGES, "embedding_width": WIDTH}
    bert = section("bert", width=16, layers=1, heads=2, positions=64)
    text = TextFormat(build_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), "", 64)
    retriever, _ = build_models(bert, section("retriever", embedding_width=WIDTH), section("reader"), 100, seed=0)
    trainer = TrainerSide(Exchange.open(folder, card, grace=0.0))
    refresh = RefreshSchedule(10**6, 2, 1, 0, "external", "auto", 1, RefreshPolicy())
    place = (torch.device("cpu"), SINGLE_PROCESS)
    source = ExchangeSource(trainer, refresh, text, *place, lambda embedding_PE, _: ExactIndex(embedding_PE))

    def embedder(weights: Any) -> Callable[[int, int], dict[str, bytes]]:
        def rows(first: int, end: int) -> dict[str, bytes]:
            return {EMBEDDINGS: save({"embeddings": torch.full((end - first, WIDTH), weights.step + 1.0)})}

        return rows

    def build() -> int:
        exchange = Exchange.open(folder, card, "builder-0", grace=0.0)
        assert measured("build", Builder(exchange, BuilderWork(PASSAGES, PART_ROWS, embedder, merge)).build_next)
        return 0

    for step in (0, 2):
        trainer.publish_weights(step, retriever_files(retriever, text), {"published": 0.0})
        assert end_of(forked(build)) == 0
    used = measured("adopt", lambda: source.at_step(0, retriever))
    newer = measured("adopt with another", lambda: source.at_step(3, retriever))
    for index, value in ((used, 1.0), (newer, 3.0)):
        assert torch.equal(index.passages.embedding_PE, torch.full((PASSAGES, WIDTH), value))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
