"""Conversion of wikitext to plain text: the sentences that a reader of the page sees.

mwparserfromhell takes quadratic time or worse for unclosed brackets, so it gets well-nested ones, section by section.
"""

import html
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_DEPTH_LIMIT = 40
_PASSES = 10  # removing broken markup can form new markup; each pass is linear


def _name_set(names: str) -> frozenset[str]:
    return frozenset(names.split(", "))


_DROPPED_SECTIONS = _name_set(
    "bibliography, citations, external link, external links, footnotes, further reading, gallery, notes, "
    "notes and references, references, references and notes, see also, sources"
)
_HIDDEN_NAMES = ("category", "file", "image", "media")

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_HIDDEN_TAGS = _name_set(
    "ce, chem, gallery, graph, hiero, imagemap, inputbox, mapframe, math, ref, references, score, script, section, "
    "source, style, syntaxhighlight, templatedata, timeline"
)
_LITERAL_TAGS = {"nowiki", "pre"}
_LINE_TAGS = _name_set("blockquote, br, center, dd, div, dl, dt, hr, li, ol, p, table, td, th, tr, ul")
_SHOWN_TAGS = _name_set(
    "abbr, bdi, bdo, big, caption, categorytree, charinsert, cite, code, col, colgroup, data, del, dfn, em, font, h1, "
    "h2, h3, h4, h5, h6, img, includeonly, indicator, ins, kbd, languages, link, maplink, mark, meta, noinclude, "
    "onlyinclude, phonos, poem, rb, rp, rt, rtc, ruby, samp, small, span, strike, strong, sub, sup, tbody, "
    "templatestyles, tfoot, thead, time, translate, tt, tvar, var, wbr"
)
# Nothing else is a tag (x<y and z>w). One-letter tags need attributes with values (a<b and c>d).
_NAME = (
    rf"[abipqsu](?=[\s/]*>|\s[^<>]*=)|(?:{'|'.join(sorted(_HIDDEN_TAGS | _LITERAL_TAGS | _LINE_TAGS | _SHOWN_TAGS))})"
)
_TAG = re.compile(rf"<(/?)({_NAME})((?:[\s/][^<>]*)?)>", re.IGNORECASE)
_PLAIN_FORMULA = re.compile(r"[\w\s+\-*/=<>,.()]{1,40}")
_LITERAL = str.maketrans({mark: f"&#{ord(mark)};" for mark in "[]{}|'=<>*#:;!_-"})

_HEADING = re.compile(r"^(={1,6})(.+?)\1[ \t]*$", re.MULTILINE)
_NESTED = re.compile(r"\{\{|\}\}|\[\[|\]\]|^[ \t:*#;]*\{\||^[ \t]*\|\}(?!\})", re.MULTILINE)
_WEB_LINK = re.compile(r"\[(?:[a-z]{2,12}:)?//[^\s\[\]]{0,2000}+[ \t]*+([^\[\]\n]{0,500}+)\]")
_WEB_LINK_START = re.compile(r"(?<!\[)\[(?=[a-zA-Z]{2,12}:|//)")
_THREE_BRACES = re.compile(r"(?<!\{)\{(?=\{\{(?!\{))|(?<!\})\}(?=\}\}(?!\}))")
_ADDRESS = re.compile(r"\b(?:https?|ftp)://[^\s|\[\]{}<>\")]*[^\s|\[\]{}<>\").,;:!?]")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:\S")

_QUOTES = re.compile(r"'{2,}")
_OMITTED = {
    "table": re.compile(r"^[ \t:*#;]*\{\|", re.MULTILINE),
    "image": re.compile(r"\[\[[ \t]*(?:file|image)[ \t]*:", re.IGNORECASE),
    "equation": re.compile(r"<(?:math|chem|ce)\b", re.IGNORECASE),
}
_STRAY = re.compile(
    rf"'{{2,}}|\[\[|\]\]|\{{\{{|\}}\}}|\{{\||\|\}}|__(?-i:[A-Z])+__|{_TAG.pattern}|^-{{4,}}", re.M | re.I
)
_TABLE_LINE = re.compile(r"^[ \t]*[|!].*$", re.MULTILINE)
_LISTED_WORD = re.compile(r"^([*#:;=][*#:;= \t]*)!", re.MULTILINE)
_SOFT_HYPHEN = "\xad"
_LIST_MARK = re.compile(r"^[*#:; \t]+", re.MULTILINE)
_BLANKS = re.compile(r"[^\S\n]+")
_LINES = re.compile(r"\n{2,}")
_EMPTY_BRACKETS = re.compile(r"(?:(?<=\s)|^)(?:\([\s,;:/–—-]*\)|\[\s*\])", re.MULTILINE)  # not those of f()
_OPENED = re.compile(r"\( ?(?:[,;:] ?)+|\( ")
_CLOSED = re.compile(r"(?: ?[,;:]){0,4} ?\)")
_COMMAS = re.compile(r",(?: ?,)+")
_COMMA_POINT = re.compile(r" ?[,;:] ?\.(?=\s|\Z)")
_BEFORE_POINT = re.compile(r" ([,.;:!?])(?=\s|\Z)")


def wikitext_to_text(wikitext: str, hidden: Collection[str] = ()) -> str:
    """Convert wikitext to its sentences, headings and list items, one per line, with blank lines around headings.

    ``hidden`` are localized namespaces whose links show no text (``Datei``). Brackets nested too deep raise ValueError.
    """
    names = {*_HIDDEN_NAMES, *(name.casefold() for name in hidden)}
    text = strip_tags(_COMMENT.sub("", wikitext.replace("\r\n", "\n").replace("\r", "\n")))
    text = _LISTED_WORD.sub(r"\1&#33;", text)
    blocks: list[str] = []
    pending: list[tuple[int, str]] = []  # headings whose section has no text so far
    for level, heading, body in _sections(text):
        pending = [(above, line) for above, line in pending if above < level]
        if heading:
            pending.append((level, heading))
        if plain := _clean(_render(body, names)):
            blocks += (title for _, line in pending if (title := _clean(_render(line, names))))
            blocks.append(plain)
            pending = []
    return "\n\n".join(blocks)


def count_omitted(wikitext: str) -> dict[str, int]:
    text = _COMMENT.sub("", wikitext)
    return {kind: sum(1 for _ in pattern.finditer(text)) for kind, pattern in _OMITTED.items()}


def strip_tags(text: str) -> str:
    """Remove HTML tags, and the content of those that hold no sentences."""
    parts = []
    at = 0
    unclosed = set()
    while tag := _TAG.search(text, at):
        parts.append(text[at : tag.start()])
        at = tag.end()
        name = tag[2].lower()
        if name in _LINE_TAGS:
            parts.append("\n")
        opens = not tag[1] and not tag[3].endswith("/")
        if opens and name in _HIDDEN_TAGS | _LITERAL_TAGS and name not in unclosed:
            end = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, at)
            if end is None:
                unclosed.add(name)
                continue
            inner = text[at : end.start()]
            at = end.end()
            if name in _LITERAL_TAGS or (name == "math" and _PLAIN_FORMULA.fullmatch(inner)):
                parts.append(inner.translate(_LITERAL))
    return "".join([*parts, text[at:]])


def _sections(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (level, heading, body) of each section outside ``_DROPPED_SECTIONS``; the lead has level 0, no heading."""
    dropped = 7  # level of the section that is dropped with its subsections; 7 if none
    level, heading, at = 0, "", 0
    for match in [*_HEADING.finditer(text), None]:
        if level <= dropped:
            key = " ".join(_QUOTES.sub("", heading).strip(" :").casefold().split())
            dropped = level if key in _DROPPED_SECTIONS else 7
        if dropped == 7:
            yield level, heading, text[at : match.start() if match else None]
        if match:
            level, heading, at = len(match[1]), match[2].strip(), match.end()


def _render(wikitext: str, names: Collection[str]) -> str:
    import mwparserfromhell

    if not any(mark in wikitext for mark in ("{", "[")):
        return wikitext
    # Web links become their text: unclosed ones are slow to parse.
    without_addresses = _ADDRESS.sub("", _WEB_LINK_START.sub("", _WEB_LINK.sub(r"\1", wikitext)))
    nested = _well_nested(_THREE_BRACES.sub("", without_addresses))
    return "".join(_render_nodes(mwparserfromhell.parse(_LIST_MARK.sub("", nested), skip_style_tags=True).nodes, names))


def _well_nested(text: str) -> str:
    """Remove tables and unpaired double brackets."""
    parts: list[str] = []
    open_marks: list[tuple[str, int]] = []  # the closing mark, and the index in parts
    at = 0
    for match in _NESTED.finditer(text):
        mark = match[0].strip(" \t:*#;")
        parts.append(text[at : match.start()])
        at = match.end()
        if mark in _CLOSING:
            if len(open_marks) == _DEPTH_LIMIT:
                raise ValueError(f"brackets are nested deeper than {_DEPTH_LIMIT}; correct the page or leave it out")
            open_marks.append((_CLOSING[mark], len(parts)))
            parts.append(_SPACED.get(mark, mark))
        elif any(mark == closing for closing, _ in open_marks):
            while True:
                closing, place = open_marks.pop()
                if closing == mark:
                    break
                parts[place] = ""
            if mark == "|}":
                del parts[place:]
            else:
                parts.append(mark)
    for _, place in open_marks:
        parts[place] = ""
    return "".join([*parts, text[at:]])


_CLOSING = {"{{": "}}", "[[": "]]", "{|": "|}"}
_SPACED = {"{{": "{{ "}  # a following brace is ambiguous: the parser would try two readings at every level


def _render_nodes(nodes: Iterable[Any], names: Collection[str]) -> Iterator[str]:
    from mwparserfromhell import nodes as kinds

    for node in nodes:
        match node:
            case kinds.Text():
                yield node.value
            case kinds.HTMLEntity():
                yield str(node)
            case kinds.Wikilink():
                yield _escape_table_mark(_render_link(node, names))
            case kinds.Template():
                yield _escape_table_mark(_render_template(node, names))
            case kinds.Argument() if node.default is not None:
                yield from _render_nodes(node.default.nodes, names)
            case kinds.Heading():
                yield from _render_nodes(node.title.nodes, names)
            case kinds.ExternalLink() if node.title is not None:
                yield from _render_nodes(node.title.nodes, names)
            case kinds.Tag() if node.contents is not None:
                yield from _render_nodes(node.contents.nodes, names)


def _escape_table_mark(text: str) -> str:
    return f"&#{ord(text[0])};{text[1:]}" if text.startswith(("!", "|")) else text


def _render_link(link: Any, names: Collection[str]) -> str:
    title = str(link.title).strip()
    name, colon, _ = title.partition(":")
    if colon and name.strip().casefold() in names:
        return ""
    if link.text is not None:
        return "".join(_render_nodes(link.text.nodes, names))
    return "" if _LANGUAGE.match(title) else "".join(_render_nodes(link.title.nodes, names)).lstrip(":")


# Templates used within sentences. Others are dropped: most are boxes, notes and pronunciations.
_SHOWN_FIRST = _name_set(
    "abbr, angbr, big, blockquote, center, cquote, ill, interlanguage link, ipa, keypress, linktext, nihongo, nobold, "
    "nobr, nowrap, pull quote, quotation, quote, sc, small, smallcaps, smaller, sub, sup, val, vr"
)
_SHOWN_SECOND = {"lang", "script"}
_FORMATTED_NUMBER = re.compile(r"formatnum: ?([\d,. ]+)")
_LANGUAGE_NAME = re.compile(r"lang-[a-z-]+|script/[a-z ]+")
_SHOWN_TEXT = {
    "'": "'",
    "'s": "'s",
    "mdash": "—",
    "emdash": "—",
    "eqm": "⇌",
    "ndash": "–",
    "nbsp": " ",
    **dict.fromkeys(("snd", "spaced ndash", "spnd", "–"), " –"),
}
_CONVERT_WORDS = {"-": "–", "–": "–", "x": "×", "by": "by", "to": "to", "and": "and", "or": "or"}
_DEGREES = {"C": "°C", "F": "°F"}


def _render_template(template: Any, names: Collection[str]) -> str:
    name = " ".join(str(template.name).replace("_", " ").casefold().split())
    if name in _SHOWN_TEXT:
        return _SHOWN_TEXT[name]
    params = [param for param in template.params if not param.showkey or str(param.name).strip().isdecimal()]
    values = ["".join(_render_nodes(param.value.nodes, names)).strip() for param in params]
    if name in _SHOWN_FIRST or _LANGUAGE_NAME.fullmatch(name):
        return "".join(values[:1])
    if name in _SHOWN_SECOND:
        return "".join(values[1:2])
    match name:
        case "convert" | "cvt":
            return _render_conversion(values)
        case "circa" | "c.":
            return " ".join(["c.", *values[:1]])
        case "as of":
            return " ".join(["as of" if template.has("lc") else "As of", *reversed(values)])
        case "frac" | "sfrac":
            return " ".join([*values[:-2], "/".join(values[-2:])])
        case "chem":
            return "".join(values)
        case "uss" | "hms":
            return " ".join([name.upper(), *values[:1]])
        case "transl":
            return "".join(values[-1:])
    number = _FORMATTED_NUMBER.fullmatch(name)
    return number[1] if number else ""


def _render_conversion(values: list[str]) -> str:
    """Render ``{{convert|5|to|10|km}}`` as "5 to 10 km", in the unit of the page."""
    words = []
    for value in values:
        words.append(_CONVERT_WORDS.get(value, _DEGREES.get(value, value)))
        if value not in _CONVERT_WORDS and not value[:1].isdigit() and not value[1:2].isdigit():
            break
    return " ".join(words)


def _clean(text: str) -> str:
    """Remove leftover markup and empty brackets, decode entities and collapse blanks."""
    text = _TABLE_LINE.sub("", text)  # once: after other marks are removed, "!" and "|" may begin words
    for _ in range(_PASSES):
        text, removed = _STRAY.subn("", text)
        if not removed:
            break
    text = html.unescape(_LIST_MARK.sub("", text)).replace(_SOFT_HYPHEN, "")
    text = _COMMAS.sub(",", _BLANKS.sub(" ", text))
    text = _EMPTY_BRACKETS.sub("", _CLOSED.sub(")", _OPENED.sub("(", text)))
    text = _BLANKS.sub(" ", text)
    text = _COMMA_POINT.sub(".", _BEFORE_POINT.sub(r"\1", text))
    lines = (line.strip() for line in text.split("\n"))
    cleaned = "\n".join(line if any(map(str.isalnum, line)) else "" for line in lines)
    return _LINES.sub("\n\n", cleaned).strip()
