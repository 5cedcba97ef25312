"""Processes that train together as under torchrun, forked from a process that has imported PyTorch and transformers.

    python tests/ranks.py PORT STAGE PARAMS [ROOT PROCESSES]...

does the same in a process with variables of its own, which the library may read as it is imported.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import forked


def run_roots(port: int, stage: str, params: Path, processes: Mapping[Path, int]) -> list[int]:
    """Run a stage under each root by so many processes, which meet at the store of this port; return exit codes.

    The output is appended to a log named as the root. Once one has failed, all are ended, as torchrun does.
    """
    ranks = {}
    for root, size in processes.items():
        variables = {  # as torchrun sets them
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        words = "run", stage, "--params", params, "--root", root
        for rank in range(size):
            environment = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = forked.realmops(*words, log=root.with_suffix(".log"), env=environment)
            ranks[process.sentinel] = process
    running = dict(ranks)
    while running:
        for sentinel in connection.wait([*running]):
            if running.pop(sentinel).wait():  # type: ignore[arg-type]
                for rank in running.values():
                    rank.terminate()
    return [rank.wait() for rank in ranks.values()]


def run_together(params: Path, processes: Mapping[Path, int], *, stage: str = "all", **variables: str) -> None:
    """Run stages by several processes under each root; with variables, forked from a process that started with them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    if variables:
        words = [sys.executable, __file__, str(store.port), stage, params]
        words += [word for root, size in processes.items() for word in (root, str(size))]
        codes = [subprocess.run(words, env={**os.environ, **variables}).returncode]
    else:
        codes = run_roots(store.port, stage, params, processes)
    assert not any(codes), (codes, [root.with_suffix(".log").read_text() for root in processes])


if __name__ == "__main__":
    meeting, asked, options, *rest = sys.argv[1:]
    sizes = dict(zip(map(Path, rest[::2]), map(int, rest[1::2]), strict=True))
    sys.exit(any(run_roots(int(meeting), asked, Path(options), sizes)))
