"""``/docs``: the routes as a page of our own, which loads nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from realmops.evaluate.report_page import page_of, table_of


def page(openapi: Mapping[str, Any]) -> str:
    """The routes of an OpenAPI description, with what each takes."""
    schemas = openapi.get("components", {}).get("schemas", {})
    sections = ['<p>For programs: <a href="openapi.json">openapi.json</a></p>']
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            sections.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            said = [route.get("summary", ""), *route.get("description", "").split("\n\n")]
            sections += [f"<p>{escape(text)}</p>" for text in said if text]
            sections += [table_of(("field", "type", "what it is"), rows) for rows in _bodies(route, schemas)]
    return page_of(f"{openapi['info']['title']} {openapi['info']['version']}", sections)


def _bodies(route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[list[tuple[str, str, str]]]:
    """The fields of a route's body."""
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
    """A JSON type in words."""
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
