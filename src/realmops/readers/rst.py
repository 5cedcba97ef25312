"""reStructuredText files, parsed by docutils without including other files; Sphinx roles are read as plain text."""

import re
from functools import cache, partial
from typing import Any

from realmops.readers.contents import format_table
from realmops.readers.documents import Outcome, RawRecord, parse_document
from realmops.readers.text import decode_text, read_file

_LIMIT = 1 << 18  # characters; docutils reads about 50,000 per second
_MARKS = re.compile(r"[*`|_]")
_MARK_LIMIT = 20_000  # docutils takes quadratic time for marks that never close, and for long lines
_LINE_LIMIT = 10_000  # characters
_ROLE = re.compile(r":[A-Za-z][\w:+.-]{0,40}:`[~!]?([^`<]{1,200}?)(?:\s{0,9}<[^`>]{0,200}>)?`")
_DIRECTIVE = re.compile(r"^([ \t]*)\.\.[ \t]+([A-Za-z][\w:+.-]*)::(.*)$", re.MULTILINE)
_SETTINGS = {
    "_disable_config": True,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "halt_level": 5,  # never
    "line_length_limit": _LINE_LIMIT,
    "report_level": 5,  # nothing
    "syntax_highlight": "none",
}


class _TooLongError(ValueError):
    """Error for a document whose substitutions expand to too much text."""


def read_rst(raw: RawRecord) -> Outcome:
    """Read a file of reStructuredText; ``raw.data`` is its path."""
    name, data = read_file(raw.data)
    source = decode_text(data, is_html=False)
    longest = max(map(len, source.splitlines()), default=0)
    if len(source) > _LIMIT or longest > _LINE_LIMIT or sum(1 for _ in _MARKS.finditer(source)) > _MARK_LIMIT:
        raise ValueError(
            f"the text is longer than {_LIMIT >> 10} Ki characters, has a line of more than {_LINE_LIMIT:,}, or "
            f"has more than {_MARK_LIMIT:,} marks; split it"
        )
    try:
        title, text, omitted = _read(source)
    except _TooLongError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"docutils cannot read it ({type(error).__name__}); correct the file") from None
    title = title or name.stem.replace("_", " ")
    return parse_document({"title": title, "text": text}, raw.place, omitted)


def _read(source: str) -> tuple[str, str, dict[str, int]]:
    """Return the first heading, the text without markup, comments and metadata, and the counts of what it lacks."""
    from docutils import nodes
    from docutils.core import publish_doctree
    from docutils.parsers.rst.languages import en

    def keep_argument(match: re.Match[str]) -> str:
        """Replace a Sphinx directive by its argument, so that its content stays; a toctree only lists other files."""
        indent, name, argument = match.groups()
        return match[0] if name in en.directives or name == "toctree" else f"{indent}{argument.strip()}\n"

    source = _DIRECTIVE.sub(keep_argument, _ROLE.sub(r"\1", source))
    tree = publish_doctree(source, reader=_bounded_reader()(), settings_overrides=_SETTINGS)
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


@cache
def _bounded_reader() -> Any:
    """Return a docutils reader class that limits the text of nested substitutions while they are expanded."""
    from docutils import nodes
    from docutils.readers.standalone import Reader
    from docutils.transforms import Transform, parts, references

    class Bounded(Transform):  # type: ignore[misc]  # docutils has no types
        default_priority = 200  # before every transform that copies

        def apply(self) -> None:
            remaining = _LIMIT

            def copied(definition: Any) -> Any:
                nonlocal remaining
                remaining -= len(definition.astext()) + 1
                if remaining < 0:
                    raise _TooLongError(f"substitutions expand to over {_LIMIT >> 10} Ki characters; split the file")
                return nodes.substitution_definition.deepcopy(definition)

            for definition in self.document.substitution_defs.values():
                definition.deepcopy = partial(copied, definition)
            transforms, unique = [], set()
            for transform in self.document.transformer.transforms:  # the three below visit the whole document
                if transform[1] not in unique:
                    transforms.append(transform)
                if transform[1] in (parts.Contents, parts.SectNum, references.TargetNotes):
                    unique.add(transform[1])
            self.document.transformer.transforms = transforms

    class BoundedReader(Reader):  # type: ignore[misc]
        def get_transforms(self) -> list[Any]:
            return [*super().get_transforms(), Bounded]

    return BoundedReader
