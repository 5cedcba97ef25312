"""Layout of the HTML reports: self-contained pages with a light and a dark colour scheme."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("report.css").read_text("utf-8")


def render_page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table><tr>{names}</tr>{cells}</table></div>"
