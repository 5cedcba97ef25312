"""Checkpoints of a training loop without an exchange, in a folder."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from realmops import artifacts

_KIND = "checkpoint"
_KEEP_LAST = 2


@dataclass(frozen=True)
class FolderCheckpoints:
    """The two newest checkpoints of a training loop, each a folder with digests."""

    folder: Path

    def restore(self) -> dict[str, bytes] | None:
        """Return the files of the newest intact checkpoint, or None; checkpoints with a wrong digest are skipped."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                names = artifacts.read_manifest(path, _KIND)["files"]
            except ValueError:
                continue
            return {name: (path / name).read_bytes() for name in names}
        return None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a checkpoint and delete all but the last two."""
        with artifacts.atomic_folder(self.folder / f"step-{step:08d}") as stage:
            for name, content in files.items():
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                (stage / name).write_bytes(content)
            artifacts.write_manifest(stage, _KIND, step=step)
        for old in sorted(self.folder.glob("step-*"))[:-_KEEP_LAST]:
            shutil.rmtree(old)
