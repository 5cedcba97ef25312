"""Layout of the HTML reports: self-contained pages with a light and a dark colour scheme."""

from collections.abc import Sequence
from html import escape

from realmops.evaluate import charts

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --edge: #d9dee5; --paper: #ffffff;
  --ground: #f4f6f8; --hit: #cfe8d8; --right: #17694a; --wrong: #a8380a; --bar: #2166c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #a3adba; --edge: #363f4b;
  --paper: #1b2027; --ground: #12161b; --hit: #245a43; --right: #6fd0a5; --wrong: #f3a173; --bar: #6ba8f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 64px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--ground); color: var(--ink); }
h1 { font-size: 26px; margin: 0 0 16px; } h2 { font-size: 19px; margin: 36px 0 12px; }
table { border-collapse: collapse; }
td, th { padding: 5px 14px 5px 0; text-align: left; vertical-align: top; }
td + td, th + th { font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 500; } .scroll { overflow-x: auto; } .soft { color: var(--soft); }
.card { background: var(--paper); border: 1px solid var(--edge); border-radius: 8px; padding: 14px 18px; }
.figures { margin-bottom: 16px; } .figures td { white-space: pre-line; }
.charts, .sides { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.charts svg { width: 100%; height: auto; display: block; border: 1px solid var(--edge); border-radius: 8px; }
.answers { display: grid; gap: 14px; } .answers p { margin: 6px 0; overflow-wrap: anywhere; }
.question { font-weight: 600; } .right { color: var(--right); } .wrong { color: var(--wrong); }
mark { background: var(--hit); color: inherit; padding: 0 2px; border-radius: 3px; }
.bar { display: inline-block; height: 9px; min-width: 1px; border-radius: 2px; background: var(--bar); }
.candidates td:nth-child(2) { width: 140px; } summary { cursor: pointer; }
"""


def render_page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{charts.STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table><tr>{names}</tr>{cells}</table></div>"
