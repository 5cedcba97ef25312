"""Locations of the Kubernetes manifests and the compiled pipelines, and templates of text files."""

import json
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent


def resource_folder(name: str) -> Path:
    """Return a folder of the wheel, into which ``setup.py`` copies it, else of the checkout."""
    packaged = _PACKAGE / name
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / name


def render_template(template: Path, **values: Any) -> str:
    """Render a Jinja template, which may extend others of its folder; values are escaped in HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = json.dumps
    return environment.get_template(template.name).render(values)
