"""Files of a new project for a cluster: kustomization.yaml, and what Argo CD, Flux and GitHub read.

Values that only the user knows contain ``SET-ME``, which the API server and kubelets refuse (InvalidImageName).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from realmops import __version__
from realmops.resources import resource_folder
from realmops.starter.yaml_text import yaml_scalar

BASES = f"realmops-{__version__}"  # folder of the package's manifests in k8s/
CLUSTERS = {"standalone": "kubeflow", "local": "realmops", "production": "realmops"}  # namespaces by overlay
PLACEHOLDER = "SET-ME"
IMAGE_TO_SET = f"registry.example.org/{PLACEHOLDER}/realmops"
REPOSITORY_TO_SET = f"{PLACEHOLDER}/realmops.git"
VALUES_TO_SET = {  # in the overlays
    "value: user@example.com": f"value: {PLACEHOLDER}@example.com",  # user of the Kubeflow profile
    "value: shared-files": f"value: {PLACEHOLDER}",  # storage class
}


def kustomization_text(cluster: str, image: str | None, files: Sequence[str]) -> str:
    """Return an overlay of the package for a project; ``files`` are what the Job reads next to params.yaml."""
    text = (resource_folder("k8s") / "overlays" / cluster / "kustomization.yaml").read_text(encoding="utf-8")
    text = text.replace("../../", f"k8s/{BASES}/").replace(" ../", " --cluster ")
    for value, placeholder in VALUES_TO_SET.items():
        text = text.replace(value, placeholder)
    tag = f"{__version__}-gpu" if cluster == "production" else __version__
    lines = _image_lines(image) if image is not None else [f"newName: {IMAGE_TO_SET}", f"newTag: {tag}"]
    block = re.search(r"^images:\n  - name: realmops\n(    new\w+: .*\n)+", text, re.MULTILINE)
    assert block is not None
    note = "  # the image of all pods, which the Dockerfile of realmops builds, in a registry that the nodes reach\n"
    # a ConfigMap has no folders
    entries = ["params.yaml", *(f"{file.replace('/', '__')}={file}" if "/" in file else file for file in files)]
    images = "".join(f"    {line}\n" for line in lines)
    return text.replace(block[0], f"images:\n{note}  - name: realmops\n{images}") + (
        "# For the Job that submits the pipeline: a changed option needs a commit, but no image. Add presets and .dvc\n"
        "# files, as KEY=PATH: a key has __ for / of the path.\n"
        "configMapGenerator:\n  - name: realmops-params\n    files:\n"
        + "".join(f"      - {yaml_scalar(entry)}\n" for entry in entries)
    )


def _image_lines(image: str) -> list[str]:
    parts = re.fullmatch(r"(?P<name>[^@]+?)(?::(?P<tag>[^:/@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?", image)
    if parts is None or not (parts["tag"] or parts["digest"]):
        raise ValueError(f"--image is {image!r}; expected NAME:TAG or NAME@sha256:DIGEST")
    version = ("digest", parts["digest"]) if parts["digest"] else ("newTag", parts["tag"])
    return [f"{key}: {yaml_scalar(value)}" for key, value in (("newName", parts["name"]), version)]


def job_files(folder: Path) -> list[str]:
    found = [*(folder / "presets").glob("*.yaml"), *folder.glob(".dvc/config"), *folder.glob("*.dvc")]
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())
