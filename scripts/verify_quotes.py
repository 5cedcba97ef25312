"""Verify that every quotation is in its document at the given offsets, for JSON lines, without dependencies.

    python scripts/verify_quotes.py ANSWERS.jsonl DOCUMENTS.jsonl
A document without an id is identified by the digest of its title and text. ``realmops verify`` reads every format.
"""

import gzip
import hashlib
import json
import sys


def read_lines(path):
    """Return the objects of a JSON lines file, plain or gzipped."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        return [json.loads(line) for line in file if line.strip()]


def document_id(document):
    """Return the id of a document, or a digest of its title and text."""
    if document.get("id") is not None:
        return str(document["id"])
    text = json.dumps([document["title"], document["text"]], ensure_ascii=False, separators=(",", ":"))
    return f"document-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


texts = {document_id(document): document["text"] for document in reversed(read_lines(sys.argv[2]))}
checked = wrong = 0
for number, line in enumerate(read_lines(sys.argv[1]), 1):
    # a record with an error and no answer is a question that failed
    for answer in (record for record in line.get("answers", [line]) if "error" not in record or "answer" in record):
        quotes = [(c, c["quote"]) for c in answer["citations"]] + [(p, p["text"]) for p in answer["passages"]]
        for place, quote in quotes:
            checked += 1
            if texts.get(place["document_id"], "")[place["start"] : place["end"]] != quote:
                wrong += 1
                print(f"line {number}: {quote!r} is not in {place['document_id']} at these offsets", file=sys.stderr)
print(f"{checked} quotations checked, {wrong} wrong")
sys.exit(1 if wrong else 0)
