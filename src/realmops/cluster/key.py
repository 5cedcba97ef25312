"""The key of a training: equal if everything that determines its result is equal; and the image of its pods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.config_yaml import parse_yaml
from realmops.options import Options
from realmops.starter.cluster_files import PLACEHOLDER

NOT_TRAINED_WITH = {"tracking"}  # sections of params without effect on the result
SUBMISSION_PARAMETERS = {"options", "run", "key"}  # pipeline parameters that a submission sets
PLACEMENT = {  # parameters of where a training runs; the number of processes and accelerators affects the result
    "accelerator", "affinity", "builders", "cpu", "cpu_request", "deployment", "endpoint", "memory", "memory_request",
    "node_selector", "runs", "secret", "settings", "shard_pods", "tolerations", "volume", "wait_seconds",
}  # fmt: skip
IMAGE_NAME = "realmops"  # of the image in the manifests, which "images:" replaces
IMAGE_FIELDS = {"newName": "", "newTag": ":", "digest": "@"}  # of kustomize, with the character before them
DIGEST = "@sha256:"  # in an image name, after the registry and repository


def training_key(
    options: Options, identities: Mapping[str, str], pipeline: Sequence[Any], arguments: Mapping[str, Any]
) -> str:
    """Return the sha256 over params, identities of the inputs, and the parsed documents of a pipeline.

    ``arguments`` in ``PLACEMENT`` do not count, so that a submission with more memory resumes in the same folder. The
    number of processes and accelerators does: it changes how a batch is split and rounded, and so the weights.
    """
    compiled, *platforms = pipeline
    inputs = compiled["root"].get("inputDefinitions", {})
    declared = {name: _declare(name, entry, arguments) for name, entry in inputs.get("parameters", {}).items()}
    root = compiled["root"] | {"inputDefinitions": inputs | {"parameters": declared}}
    return artifacts.digest_of(
        {
            "params": {name: keys for name, keys in options.cache_key().items() if name not in NOT_TRAINED_WITH},
            "inputs": identities,
            "pipeline": [compiled | {"root": root}, *platforms],
        }
    )


def _declare(name: str, entry: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    declared = {field: value for field, value in entry.items() if field != "defaultValue"}
    value = arguments.get(name, None if name in SUBMISSION_PARAMETERS else entry.get("defaultValue"))
    if name in PLACEMENT or value is None:
        return declared
    if entry["parameterType"].startswith("NUMBER"):  # 1 of the command line is 1.0 in a compiled file
        value = float(value)
    if name == "image" and DIGEST in value:
        value = value.partition(DIGEST)[2]
    return declared | {"defaultValue": value}


def image_note(image: str) -> list[str]:
    """Return a note if the image name is mutable: without a digest, and with no tag or a word such as ``latest``."""
    tag = image.rpartition("/")[2].partition(":")[2]
    if DIGEST in image or any(character.isdigit() for character in tag):
        return []
    return [
        f"image is {image!r}, whose {f'tag {tag}' if tag else 'missing tag'} does not identify the code: after a new "
        "build the key is unchanged and --once finds the older run; set IMAGE@sha256:..., or a tag for each build"
    ]


def find_image(project: Path) -> str | None:
    """Return the image that kustomization.yaml sets for realmops, or None; ValueError if it has a placeholder."""
    file = project / "kustomization.yaml"
    if not file.is_file():
        return None
    content: Any = parse_yaml(file.read_bytes(), file) or {}
    entry = next((entry for entry in content.get("images") or () if entry.get("name") == IMAGE_NAME), None)
    if entry is None:
        return None
    fields = {name: f"{mark}{entry[name]}" for name, mark in IMAGE_FIELDS.items() if entry.get(name) is not None}
    image = "".join(({"newName": IMAGE_NAME} | fields).values())
    if PLACEHOLDER in image:
        raise ValueError(
            f"{file}: the image {IMAGE_NAME} is {image}, a placeholder; set it to your image, for example "
            "ghcr.io/OWNER/realmops, or give --argument image=IMAGE"
        )
    return image
