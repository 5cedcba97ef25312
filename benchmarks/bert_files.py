"""Our encoder as a folder that Hugging Face's BERT can load, for what is compared with it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from realmops.model.encoder import Bert, MaskedWordHead, export_state


def save_bert(folder: Path, bert: Bert, head: MaskedWordHead | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    (folder / "config.json").write_text(json.dumps(bert.config.to_json(), indent=1) + "\n")
    save_file(export_state(bert, head), folder / "model.safetensors")
