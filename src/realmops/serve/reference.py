"""``/docs``: the API reference as one self-contained page."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from realmops.evaluate.report_page import render_page, render_table


def page(openapi: Mapping[str, Any]) -> str:
    """Render the routes of an OpenAPI description with the fields of their bodies."""
    schemas = openapi.get("components", {}).get("schemas", {})
    sections = ['<p>For programs: <a href="openapi.json">openapi.json</a></p>']
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            sections.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            paragraphs = [route.get("summary", ""), *route.get("description", "").split("\n\n")]
            sections += [f"<p>{escape(text)}</p>" for text in paragraphs if text]
            sections += [render_table(("field", "type", "description"), rows) for rows in _bodies(route, schemas)]
    return render_page(f"{openapi['info']['title']} {openapi['info']['version']}", sections)


def _bodies(route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the rows (name, type, description) of each body of a route."""
    for content in route.get("requestBody", {}).get("content", {}).values():
        schema = schemas.get(content["schema"].get("$ref", "").rpartition("/")[2], {})
        required = schema.get("required", ())
        rows = [
            (f"{name}{' (required)' if name in required else ''}", _type(field), field.get("description", ""))
            for name, field in schema.get("properties", {}).items()
        ]
        if rows:
            yield rows


def _type(field: Mapping[str, Any]) -> str:
    """Describe a JSON type."""
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
