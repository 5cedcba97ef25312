"""What a refresh takes in memory at its most, in copies of the embeddings, and what a stage leaves behind."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PASSAGES, WIDTH, PART_ROWS = 1 << 17, 128, 1 << 13
COPY = PASSAGES * WIDTH * 4  # 64 MiB: small beside it are a part, both models, and what is freed and kept


def test_a_builder_holds_less_than_the_index_and_a_trainer_two_generations(tmp_path: Path) -> None:
    took = [json.loads(line) for line in run_here(str(tmp_path)).splitlines()]
    assert [what for what, _ in took] == ["build", "build", "adopt", "adopt beside another"]
    assert all(copies < 1 for what, copies in took if what == "build"), took  # the matrix is mapped, and let go
    assert all(0.9 < copies < 1.3 for what, copies in took if what != "build"), took


def test_a_stage_begins_without_what_the_one_before_it_kept() -> None:
    kept, given_back = json.loads(run_here())
    assert kept > 0.9
    assert given_back < 0.1


def run_here(*arguments: str) -> str:
    """Return what this file prints in a process of its own, which finds the modules that this one finds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def anonymous() -> int:
    """Bytes that this process holds itself. Pages of mapped files do not count: the kernel drops them when it likes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measured(what: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives; printed is how many copies of the embeddings the process grew by.

    The kernel keeps no peak of anonymous memory, so a thread looks every half millisecond.  A copy of all embeddings
    is held for longer, as it is written or hashed; what ``work`` leaves is seen at the end in any case.
    """
    before = anonymous()
    seen = [before]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            seen.append(anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        found = work()
    finally:
        done.set()
        watcher.join()
    seen.append(anonymous())
    print(json.dumps([what, (max(seen) - before) / COPY]), flush=True)
    return found


def main(folder: Path) -> None:
    """A trainer and, in processes of their own, builders; passages are embedded as the step of the weights and 1."""
    import torch
    from exchange_lab import end_of, forked
    from safetensors.torch import save
    from small_world import section

    from realmops.corpus.vocabulary import build_tokenizer
    from realmops.devices import configure_malloc
    from realmops.model.build import build_models
    from realmops.model.retriever_files import TextFormat, retriever_files
    from realmops.refresh.builder import Builder, BuilderWork
    from realmops.refresh.builder_process import merge
    from realmops.refresh.exchange import Exchange
    from realmops.refresh.trainer import RefreshPolicy, TrainerSide
    from realmops.search.embeddings import EMBEDDINGS
    from realmops.search.exact import ExactIndex
    from realmops.train.index_source import ExchangeSource, RefreshSchedule
    from realmops.train.parallel import SINGLE_PROCESS
    from realmops.train.training_exchange import SharedIndexSource

    configure_malloc()
    card = {"passages": PASSAGES, "embedding_width": WIDTH}
    bert = section("bert", width=16, layers=1, heads=2, intermediate=32, positions=64)
    text = TextFormat(build_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), "", 64)
    retriever, _ = build_models(bert, section("retriever", embedding_width=WIDTH), section("reader"), 100, seed=0)
    trainer = TrainerSide(Exchange.open(folder, card, grace=0.0))
    refresh = RefreshSchedule(10**6, 2, 1, 0, "external", "auto", 1, RefreshPolicy())
    cpu = torch.device("cpu")
    own = ExchangeSource(trainer, refresh, text, cpu)
    source = SharedIndexSource(SINGLE_PROCESS, own, cpu, lambda embedding_PE, _: ExactIndex(embedding_PE))

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
    newer = measured("adopt beside another", lambda: source.at_step(3, retriever))
    for index, value in ((used, 1.0), (newer, 3.0)):
        assert torch.equal(index.passages.embedding_PE, torch.full((PASSAGES, WIDTH), value))


def two_stages() -> None:
    """What stays of 64 MiB in tensors that a stage made, of those it freed: while it works, and as the next begins."""
    import torch

    from realmops.devices import configure_process

    configure_process(1)
    before = anonymous()
    tensors = [torch.ones(1 << 16) for _ in range(256)]  # 256 KiB each
    end = torch.ones(1 << 16)  # behind them, still in use: glibc frees by itself what lies at the end alone
    tensors.clear()
    kept = anonymous() - before
    configure_process(1)
    print(json.dumps([size / COPY for size in (kept, anonymous() - before - end.nbytes)]))


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) > 1 else two_stages()
