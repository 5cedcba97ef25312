"""The states of a training loop that works alone, in a folder."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from realmops import artifacts

_KIND = "checkpoint"
_KEPT = 2


@dataclass(frozen=True)
class FolderCheckpoints:
    """The newest two states of a training loop that works alone, each a folder with digests."""

    folder: Path

    def restore(self) -> dict[str, bytes] | None:
        """The newest state whose digests are right; a damaged one is stepped over."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                names = artifacts.read_manifest(path, _KIND)["files"]
            except ValueError:
                continue
            return {name: (path / name).read_bytes() for name in names}
        return None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Commit a state; older ones than the last two go."""
        with artifacts.atomic_folder(self.folder / f"step-{step:08d}") as stage:
            for name, content in files.items():
                (stage / name).write_bytes(content)
            artifacts.write_manifest(stage, _KIND, step=step)
        for old in sorted(self.folder.glob("step-*"))[:-_KEPT]:
            shutil.rmtree(old)
