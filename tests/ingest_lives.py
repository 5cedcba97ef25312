"""Write one snapshot in processes that are killed again and again.

    python tests/ingest_lives.py CORPUS FOLDER WORK VOCABULARY STEP

A life dies by SIGKILL just before its n-th write to a growing file or durable operation; each life n is larger by
STEP.  Every batch ends with a checkpoint.  Prints, as JSON, how many records each life found done.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from exchange_lab import end_of, forked
from lives import die_at

from realmops.artifacts import atomic_folder
from realmops.corpus import ingest, snapshot_writer
from realmops.corpus.flat import GrowingFile
from realmops.corpus.formats import sources
from realmops.corpus.vocabulary import read_vocabulary

OPTIONS = {"block_wordpieces": 24, "drop_titles": True}


def main(corpus: Path, folder: Path, work: Path, vocabulary: Path, step: int) -> None:
    ingest._BATCH_RECORDS = 60
    snapshot_writer._CHECKPOINT_SECONDS = 0.0
    found: list[int] = []
    status = -1
    while status < 0:
        checkpoint = work / snapshot_writer._CHECKPOINT
        found.append(json.loads(checkpoint.read_bytes())["total"]["records"] if checkpoint.is_file() else 0)

        def life() -> int:
            die_at(step * len(found), (os, "link"), (GrowingFile, "write"))
            pieces = read_vocabulary(vocabulary)
            with atomic_folder(folder) as stage:
                snapshot_writer.write_snapshot(sources(corpus, "auto"), stage, work=work, vocabulary=pieces, **OPTIONS)
            return 0

        status = end_of(forked(life))
    print(json.dumps({"status": status, "found": found}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), int(sys.argv[5]))
