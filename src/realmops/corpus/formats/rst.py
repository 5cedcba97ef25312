"""reStructuredText by docutils, which opens no other file; what only Sphinx knows is read as plain text."""

import re
from functools import cache, partial
from pathlib import PurePath
from typing import Any

from realmops.corpus.documents import Format, Outcome, Raw, document_or_dropped
from realmops.corpus.formats.text import decode, whole_file

_LIMIT = 1 << 18  # characters; docutils reads some 50,000 a second
_MARKS = re.compile(r"[*`|_]")
_MARK_LIMIT = 20_000  # docutils takes quadratic time for marks that never close, and for long lines
_LINE_LIMIT = 10_000
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
    """The text that a document makes of itself is too long."""


def _convert(raw: Raw) -> Outcome:
    source = decode(raw.data["bytes"], is_page=False)
    longest = max(map(len, source.splitlines()), default=0)
    if len(source) > _LIMIT or longest > _LINE_LIMIT or sum(1 for _ in _MARKS.finditer(source)) > _MARK_LIMIT:
        raise ValueError(
            f"the text is longer than {_LIMIT >> 10} Ki characters, has a line of more than {_LINE_LIMIT:,}, or has "
            f"more than {_MARK_LIMIT:,} marks; split it"
        )
    try:
        title, text = _read(source)
    except _TooLongError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"docutils cannot read it ({type(error).__name__}); correct the file") from None
    title = title or PurePath(raw.data["name"]).stem.replace("_", " ")
    return document_or_dropped({"title": title, "text": text}, raw.place)


def _read(source: str) -> tuple[str, str]:
    """(title, text): the first heading, and the text without marks, comments and field lists."""
    from docutils import nodes
    from docutils.core import publish_doctree
    from docutils.parsers.rst.languages import en

    def plain(found: re.Match[str]) -> str:
        """A directive of Sphinx: its argument, and what stands indented below it; but no list of other files."""
        indent, name, argument = found.groups()
        return found[0] if name in en.directives or name == "toctree" else f"{indent}{argument.strip()}\n"

    source = _DIRECTIVE.sub(plain, _ROLE.sub(r"\1", source))
    tree = publish_doctree(source, reader=_reader()(), settings_overrides=_SETTINGS)
    left_out = nodes.Invisible, nodes.docinfo, nodes.field_list, nodes.raw, nodes.system_message
    for node in [node for node in tree.findall() if isinstance(node, left_out) and not isinstance(node, nodes.target)]:
        node.parent.remove(node)
    blocks = [node for node in tree.findall(nodes.TextElement) if not isinstance(node, nodes.Inline)]
    title = next((node for node in blocks if isinstance(node, nodes.title)), None)
    text = "\n\n".join(filter(None, (node.astext().strip() for node in blocks if node is not title)))
    return " ".join(title.astext().split()) if title else "", text


@cache
def _reader() -> Any:
    """The class of docutils' reader that counts what substitutions make, which may hold others, as it is made."""
    from docutils import nodes
    from docutils.readers.standalone import Reader
    from docutils.transforms import Transform, parts, references

    class Bounded(Transform):  # type: ignore[misc]  # docutils has no types
        default_priority = 200  # before all that copies

        def apply(self) -> None:
            room = _LIMIT

            def copied(definition: Any) -> Any:
                nonlocal room
                room -= len(definition.astext()) + 1
                if room < 0:
                    raise _TooLongError(f"its substitutions make more than {_LIMIT >> 10} Ki characters; split it")
                return nodes.substitution_definition.deepcopy(definition)

            for definition in self.document.substitution_defs.values():
                definition.deepcopy = partial(copied, definition)
            left, seen = [], set()
            for transform in self.document.transformer.transforms:  # each of these goes over the whole document
                if transform[1] not in seen:
                    left.append(transform)
                if transform[1] in (parts.Contents, parts.SectNum, references.TargetNotes):
                    seen.add(transform[1])
            self.document.transformer.transforms = left

    class BoundedReader(Reader):  # type: ignore[misc]
        def get_transforms(self) -> list[Any]:
            return [*super().get_transforms(), Bounded]

    return BoundedReader


RST = Format("rst", whole_file, _convert, is_document=True, needs="docutils")
