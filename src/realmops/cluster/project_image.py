"""The image in a project's kustomization.yaml, and the placeholders that ``realmops init`` leaves in files."""

from pathlib import Path
from typing import Any

import yaml

from realmops.config import Values

PLACEHOLDER = "SET-ME"
IMAGE_NAME = "realmops"  # of the image in the manifests, which "images:" replaces


def find_image(project: Path) -> str | None:
    """Return the image that kustomization.yaml sets for realmops; None if there is no such file or entry.

    Raises:
        ValueError: the file is malformed, or the image contains a placeholder.
    """
    file = project / "kustomization.yaml"
    if not file.is_file():
        return None
    try:
        content: Any = yaml.load(file.read_bytes(), yaml.CSafeLoader) or {}
        entry = next((entry for entry in content.get("images") or () if entry.get("name") == IMAGE_NAME), None)
    except (AttributeError, TypeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{file} is not a kustomization with images: {' '.join(str(error).split())}; see 'kubectl kustomize'"
        ) from None
    if entry is None:
        return None
    fields = {name: str(entry[name]) for name in ("newName", "newTag", "digest") if entry.get(name) is not None}
    for name, value in fields.items():
        if PLACEHOLDER in value:
            raise ValueError(
                f"{file}: {name} of the image {IMAGE_NAME} is {value}, a placeholder; set it to that of your image, "
                "for example ghcr.io/OWNER/realmops, or give --argument image=IMAGE"
            )
    image = fields.get("newName", IMAGE_NAME)
    image += f":{fields['newTag']}" if "newTag" in fields else ""
    return image + (f"@{fields['digest']}" if "digest" in fields else "")


def check_placeholders(values: Values, source: str) -> None:
    """Raise ValueError for the first option that still contains a placeholder of ``realmops init``."""
    for section, keys in values.items():
        for key, value in keys.items():
            if isinstance(value, str) and PLACEHOLDER in value:
                raise ValueError(f"{source}: {section}.{key} is {value}, a placeholder; set it to your own value")
