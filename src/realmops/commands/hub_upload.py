"""``realmops export --push``: upload of an export to a model repository of the Hugging Face hub."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.credentials import error_line

TOKEN = "HF_TOKEN"
_BY_PEOPLE = {".gitattributes", "LICENSE", "README.md"}  # files that the hub's form for new repositories writes


class HubRepository:
    """A model repository OWNER/NAME of the hub; nothing is sent before :meth:`upload`."""

    def __init__(self, name: str, kind: str) -> None:
        from huggingface_hub import HfApi

        if name.count("/") != 1:
            raise ValueError(f"--push {name}: expected OWNER/NAME, with the name of a user or organisation")
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise ValueError(
                f"--push {name}: {TOKEN} is not set; set it to a token with write access, of your account on the hub"
            )
        self.name, self._kind = name, kind
        self._api = HfApi(token=token, library_name="realmops")
        self._written: set[str] = set()  # files of an earlier export

    def inspect(self) -> str | None:
        """Return the licence in the repository's card, if any; ValueError if it has files of others."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._errors():
            try:
                info = self._api.model_info(self.name)
            except RepositoryNotFoundError:
                return None
        present = {file.rfilename for file in info.siblings or ()}
        if foreign := present - _BY_PEOPLE:
            manifest = self._manifest() if artifacts.MANIFEST in present else {}
            if not artifacts.has_valid_digest(manifest) or manifest["kind"] != self._kind:
                raise ValueError(
                    f"--push {self.name}: the repository has {min(foreign)}, which 'realmops export' did not write; "
                    "name a new repository, or empty this one"
                )
            self._written = present & manifest["files"].keys()
        licence = getattr(info.card_data, "license", None)
        return licence if isinstance(licence, str) else None

    def _manifest(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, self._errors():
            path = self._api.hf_hub_download(self.name, artifacts.MANIFEST, local_dir=folder)
            manifest = artifacts.read_json(Path(path))
        return manifest if isinstance(manifest, dict) else {}

    def upload(self, folder: Path) -> str:
        """Upload a folder, to a private repository if new, and remove files that it lacks; return the commit's URL."""
        here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        remove = sorted(self._written - here) or None
        with self._errors(f"; {folder} is complete: run the command again, or 'hf upload {self.name} {folder}'"):
            self._api.create_repo(self.name, private=True, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=self.name, folder_path=folder, delete_patterns=remove, commit_message="Export of realmops"
            )
        return str(commit.commit_url)

    @contextmanager
    def _errors(self, remedy: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the hub, the network, HF_HUB_OFFLINE, or the storage of large files
            raise ValueError(f"--push {self.name}: the hub failed or refused ({error_line(error)}){remedy}") from None
