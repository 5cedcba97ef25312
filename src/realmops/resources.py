"""Locations of the Kubernetes manifests and the compiled pipelines."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def resource_folder(name: str) -> Path:
    """Return the folder ``k8s`` or ``pipelines`` of the installed package or of the checkout.

    ``setup.py`` copies both into the wheel; an editable install and ``PYTHONPATH=src`` read the checkout.
    """
    packaged = _PACKAGE / name
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / name
