"""``realmops search``: passages of a run, whatever of it is trained so far."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from realmops import artifacts
from realmops.answering.passage_search import ID, Search, Where
from realmops.artifacts import MANIFEST, WORK
from realmops.commands.answers import ClosedBookModel, generation_of_run, search_of
from realmops.commands.trained import sections_of
from realmops.config import RunOptions, defaults, parse_section
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, freeze_products, tune_process
from realmops.model.checkpoint_files import load_models, weight_files
from realmops.model.retriever import Retriever
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import embed_corpus, load_passages, save_passages
from realmops.search.exact import exact
from realmops.stages import STAGES, Report

FOLDER = "search"  # below the work folder: embeddings of a retriever that is not fine-tuned yet
LIMIT: int = defaults()["finetune"]["query_wordpieces"]  # of queries, before fine-tuning says it
_CONDITION = re.compile(r"([^<>=]+)(>=|<=|=|>|<)(.*)", re.DOTALL)
_BOUND = {">=": "gte", ">": "gt", "<=": "lte", "<": "lt"}
_AROUND = 90  # characters shown on either side of the words that were found


def search_of_run(root: Path, report: Report) -> Search:
    """What searches the corpus of a run: by the last of its retrievers, and by words alone before there is one.

    The passages are embedded once for a retriever that is not fine-tuned, and kept under the root.

    Raises ValueError where there is no snapshot.
    """
    if _is_done(root, "finetune"):
        with suppress(ClosedBookModel):  # the retrievers of earlier stages are left
            return search_of(generation_of_run(root))
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    about = {"snapshot": snapshot.corpus_hash, "stage": "snapshot"}
    words = Bm25.of(snapshot)
    for stage in ("pretrain", "ict"):
        sections = sections_of(root, stage) if _is_done(root, stage) else {}
        if not sections:
            continue
        run = parse_section("run", sections["run"])
        retriever, passages, dtype = _embedded(root, stage, run, snapshot, report)
        return Search(snapshot, words, retriever, passages, LIMIT, dtype, about | {"stage": stage})
    report.say("no retriever is trained yet: words alone are searched")
    return Search(snapshot, words, None, None, LIMIT, torch.float32, about)


def _is_done(root: Path, stage: str) -> bool:
    return (root / STAGES[stage].folder / MANIFEST).is_file()


def _embedded(
    root: Path, stage: str, run: RunOptions, snapshot: Snapshot, report: Report
) -> tuple[Retriever, Any, torch.dtype]:
    """The retriever of a stage with the embeddings of all passages, which are made where they are not there."""
    folder = root / STAGES[stage].folder
    manifest = artifacts.read_manifest(folder, stage)
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    retriever, _ = load_models(folder, snapshot.vocabulary_hash)
    freeze_products(retriever.eval(), dtype)
    retriever = retriever.to(device)
    weights = [path.relative_to(folder).as_posix() for path in weight_files(folder, "retriever")]
    digests = [manifest["files"][name]["sha256"] for name in weights]
    key = artifacts.digest_of([*digests, snapshot.corpus_hash, str(dtype)])[:16]
    kept = root / WORK / FOLDER / key
    if not kept.is_dir():
        bar = report.progress("passages embedded", len(snapshot))
        embedding = embed_corpus(retriever, snapshot, dtype, bar)
        artifacts.make_folder(kept.parent)
        with artifacts.atomic_folder(kept) as made:
            save_passages(made, exact(embedding, retriever.vectors), snapshot.corpus_hash)
        for other in kept.parent.glob("[!.]*"):  # of another retriever or corpus; with a dot others are at work
            if other != kept:
                shutil.rmtree(other, ignore_errors=True)
    return retriever, load_passages(kept, snapshot, device, retriever.vectors), dtype


def filter_of(conditions: Sequence[str]) -> Where:
    """Of ``FIELD=VALUE``, ``FIELD>=VALUE`` and so on; a field with ``=`` twice has either.

    A value that is a number, true or false as JSON writes them is that; any other, and a document's id, is text.
    """
    found: dict[str, Any] = {}
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if not match:
            raise ValueError(f"--where {text!r}: FIELD=VALUE is wanted, or >=, >, <= or < in the place of =")
        field, sign, value = match[1].strip(), match[2], match[3].strip()
        known = found.setdefault(field, [] if sign == "=" else {})
        if isinstance(known, list) != (sign == "=") or _BOUND.get(sign) in known:
            raise ValueError(f"--where {text!r}: {field} has another condition that this one cannot stand beside")
        if sign == "=":
            known.append(_value(value, field))
        else:
            known[_BOUND[sign]] = _value(value, field)
    return found


def _value(text: str, field: str) -> Any:
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float) and field != ID else text


def shown(record: Mapping[str, Any]) -> Iterator[str]:
    """The passages that were found, for people."""
    if not record["passages"]:
        yield "nothing was found"
    for number, one in enumerate(record["passages"], 1):
        places = one["highlights"]
        first = max(0, places[0][0] - _AROUND) if places else 0
        end = min(len(one["text"]), (places[0][1] if places else 0) + 2 * _AROUND)
        text, at = "", first
        for low, high in places:
            if high <= end:
                text += f"{one['text'][at:low]}[{one['text'][low:high]}]"
                at = high
        text = " ".join((text + one["text"][at:end]).split())
        before, after = "… " if first else "", " …" if end < len(one["text"]) else ""
        page = f", page {one['page']}" if one.get("page") else ""
        yield f"{number}. {one['title'] or one['document_id']}  ({one['score']:.3g})"
        yield f"   {before}{text}{after}"
        yield f"   {one['uri']}, characters {one['start']} to {one['end']}{page}"
