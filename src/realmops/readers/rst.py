"""reStructuredText files, parsed by docutils without including other files; Sphinx roles are read as plain text."""

import re
from typing import Any

from realmops.readers.contents import format_table
from realmops.readers.documents import Outcome, RawRecord, parse_document
from realmops.readers.text import decode_text, read_file

_ROLE = re.compile(r":[A-Za-z][\w:+.-]{0,40}:`[~!]?([^`<]{1,200}?)(?:\s{0,9}<[^`>]{0,200}>)?`")
_DIRECTIVE = re.compile(r"^([ \t]*)\.\.[ \t]+([A-Za-z][\w:+.-]*)::(.*)((?:\n[ \t]+:[\w-]+:.*)*)", re.MULTILINE)
_OPTION = re.compile(r"\n[ \t]+:([\w-]+):.*")
_SETTINGS = {
    "_disable_config": True,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "halt_level": 5,  # never
    "line_length_limit": 1 << 24,
    "report_level": 5,  # nothing
    "syntax_highlight": "none",
}


def read_rst(raw: RawRecord) -> Outcome:
    """Read a file of reStructuredText; ``raw.data`` is its path."""
    name, data = read_file(raw.data)
    source = decode_text(data, is_html=False)
    try:
        title, text, omitted = _read(source)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"docutils cannot read it ({type(error).__name__}); correct the file") from None
    return parse_document({"title": title or name.stem.replace("_", " "), "text": text}, raw.place, omitted)


def _read(source: str) -> tuple[str, str, dict[str, int]]:
    """Return the first heading, the text without markup, comments and metadata, and the counts of what it lacks."""
    from docutils import nodes
    from docutils.core import publish_doctree

    source = _DIRECTIVE.sub(_adapt_directive, _ROLE.sub(r"\1", source))
    tree = publish_doctree(source, settings_overrides=_SETTINGS)
    kinds = {"image": nodes.image, "comment": nodes.comment, "embedded object": nodes.raw}
    omitted = {kind: sum(1 for _ in tree.findall(node)) for kind, node in kinds.items()}
    for table in reversed(list(tree.findall(nodes.tgroup))):  # inner ones first
        rows = ((cell.astext() for cell in row) for row in table.findall(nodes.row))
        table.parent.replace(table, nodes.literal_block("", format_table(rows)))
    excluded = nodes.Invisible, nodes.docinfo, nodes.raw, nodes.system_message
    for node in [node for node in tree.findall() if isinstance(node, excluded) and not isinstance(node, nodes.target)]:
        node.parent.remove(node)
    blocks = [node for node in tree.findall(nodes.TextElement) if not isinstance(node, nodes.Inline)]
    title = next((node for node in blocks if isinstance(node, nodes.title)), None)
    text = "\n\n".join(filter(None, (node.astext().strip() for node in blocks if node is not title)))
    return " ".join(title.astext().split()) if title else "", text, omitted


def _adapt_directive(match: re.Match[str]) -> str:
    """Replace a Sphinx directive by its argument, so that its content is read; a toctree only lists other files.

    An option that docutils does not know is removed: it would leave the directive out.
    """
    from docutils.parsers.rst import directives
    from docutils.parsers.rst.languages import en

    indent, name, argument, options = match.groups()
    if name == "toctree":
        return match[0]
    if name not in en.directives:
        return f"{indent}{argument.strip()}\n{_OPTION.sub('', options)}"
    directive, _ = directives.directive(name, en, None)
    known: dict[str, Any] = getattr(directive, "option_spec", None) or {}
    return match[0].removesuffix(options) + _OPTION.sub(lambda option: option[0] * (option[1] in known), options)
