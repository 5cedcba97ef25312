"""Update a small project again and again, the updater killed by SIGKILL, until so many kills are done.

    python tests/updates_killed.py PROJECT KILLS SEED

The documents change in turn. A life of the updater dies just before its n-th durable operation, or at a random
instant; at last one comes to its end, and the documents change again. Lives are forked from this process, which has
loaded everything and done nothing. Prints how many were killed and how many updates were made, as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from exchange_lab import end_of, forked
from lives import die_at
from small_project import Quiet, write_text

from realmops.commands.update import update
from realmops.config import load

TEXTS = tuple(f"Anna Berg was born in {place}. She wrote The Cold Sea in 1931." for place in ("Bergen", "Fjell"))


def main(project: Path, kills: int, seed: int) -> None:
    """The whole of it."""
    values, rng = load(project / "params.yaml"), random.Random(seed)
    done = {"killed": 0, "updates": 0}
    while done["killed"] < kills or not done["updates"]:
        write_text(project, TEXTS[done["updates"] % 2])
        at = rng.randrange(1, 4)
        while True:
            deadline = rng.uniform(0.05, 1.0) if rng.random() < 0.3 else None

            def life(at: int = at, timed: bool = deadline is not None) -> int:
                if not timed:
                    die_at(at)
                update(values, project=project, root=project / "root", report=Quiet())
                return 0

            pid = forked(life)
            if deadline is not None:
                time.sleep(deadline)
                os.kill(pid, signal.SIGKILL)
            code = end_of(pid)
            assert code in (0, -signal.SIGKILL), code
            if code == 0:
                break
            done["killed"] += 1
            at += rng.randrange(1, 12)
        done["updates"] += 1
    print(json.dumps(done))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
