"""Does every quotation stand where its answer says? For documents as JSON lines; needs nothing but Python.

    python scripts/verify_quotes.py ANSWERS.jsonl DOCUMENTS.jsonl

A document without an id goes by the digest of its title and text. ``realmops verify`` reads every format.
"""

import gzip
import hashlib
import json
import sys


def lines(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        return [json.loads(line) for line in file if line.strip()]


def name(document):
    if document.get("id") is not None:
        return str(document["id"])
    text = json.dumps([document["title"], document["text"]], ensure_ascii=False, separators=(",", ":"))
    return f"document-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


answers, texts = lines(sys.argv[1]), {name(one): one["text"] for one in reversed(lines(sys.argv[2]))}
checked = wrong = 0
for number, line in enumerate(answers, 1):
    for answer in line.get("answers", [line]):
        if "error" in answer and "answer" not in answer:
            continue  # of a question that could not be asked
        quotes = [(c, c["quote"]) for c in answer["citations"]] + [(p, p["text"]) for p in answer["passages"]]
        for place, quote in quotes:
            checked += 1
            if texts.get(place["document_id"], "")[place["start"] : place["end"]] != quote:
                wrong += 1
                print(f"line {number}: {quote!r} does not stand in {place['document_id']}", file=sys.stderr)
print(f"{checked} quotations checked, {wrong} wrong")
sys.exit(1 if wrong else 0)
