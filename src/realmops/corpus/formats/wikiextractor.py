"""What WikiExtractor writes: files of ``<doc id= url= title=>`` blocks, the title on the first line."""

import html
import re
from collections.abc import Iterator
from pathlib import Path

from realmops.corpus.compressed import DAMAGE, damage, open_compressed
from realmops.corpus.documents import LINE_LIMIT, Format, Outcome, Raw, Rejected, document_or_dropped
from realmops.corpus.formats.wikitext import without_tags

# A value may hold quotes itself: it ends where another attribute or the end of the line follows.
_END = re.compile(r'"(?=\s+(?:id|url|title|revid)=|\s*>\s*$)')
_ATTRIBUTE = re.compile(r'(?:<doc)?\s+(id|url|title)="(.*)', re.DOTALL)


def _records(path: Path) -> Iterator[Raw | Rejected]:
    """One block each, as bytes from ``<doc`` up to ``</doc>``."""
    with open_compressed(path) as (file, position):
        number, first, size = 0, 0, 0
        block = bytearray()  # empty outside of blocks; does not grow once size is over the limit
        try:
            while line := file.readline(LINE_LIMIT + 1):
                number += 1
                place = f"{path}:{first or number}"
                if line.startswith(b"<doc "):
                    if block:
                        yield Rejected(place, "the block has no </doc>; extract the file again")
                    block, first, size = bytearray(line), number, len(line)
                elif block and line.startswith(b"</doc>"):
                    if size > LINE_LIMIT:
                        yield Rejected(place, f"the block is longer than {LINE_LIMIT >> 20} MiB; split it")
                    else:
                        yield Raw(place, bytes(block), position())
                    block, first = bytearray(), 0
                elif block:
                    size += len(line)
                    if size <= LINE_LIMIT:
                        block += line
                elif line.strip():
                    yield Rejected(place, "text outside of <doc ...> and </doc>; extract the file again")
            if block:
                yield Rejected(
                    f"{path}:{first}", "the file ends inside of a block; copy or extract it again", ends_file=True
                )
        except DAMAGE as error:
            yield Rejected(f"{path}:{number + 1}", damage(error, path), ends_file=True)


def _understand(raw: Raw) -> Outcome:
    try:
        head, _, text = raw.data.decode().partition("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the block; extract the file again") from None
    attributes = filter(None, map(_ATTRIBUTE.match, _END.split(head)))
    found = {one[1]: html.unescape(one[2]) for one in attributes}
    if not found.get("title") or not found.get("id"):
        raise ValueError(f'found {head[:80]!r}, wanted <doc id="..." url="..." title="...">')
    text = html.unescape(text).strip()
    first, _, rest = text.partition("\n")
    if first.strip() == found["title"].strip():
        text = rest.strip()
    # What WikiExtractor did not understand it leaves as tags.
    return document_or_dropped({**found, "text": without_tags(text).strip()}, raw.place)


WIKIEXTRACTOR = Format("wikiextractor", _records, _understand)
