"""Retrievers of other frameworks that ask a Searcher: LangChain, LlamaIndex, Haystack. Each module has its extra."""

from pathlib import Path
from typing import Any

from realmops.api import Passage, Searcher

IDS = ("document_id", "passage_id", "start", "end")  # say nothing to a language model
PLACE = (*IDS, "title", "uri", "page")


def check_source(searcher: Searcher | None, root: str | Path | None, model: str | None) -> None:
    """Refuse a retriever that does not know what to search, or that was told twice."""
    if (searcher is None) == (root is None and model is None):
        raise ValueError("a retriever takes either searcher, or root or model to open one from")


def opened(searcher: Searcher | None, root: str | Path | None, model: str | None) -> Searcher:
    """The searcher that was given, else the one of a run or of a registered model."""
    check_source(searcher, root, model)
    return searcher or Searcher.open(root or ".", model=model)


def metadata_of(passage: Passage) -> dict[str, Any]:
    """Where a passage stands, beside its document's own fields; of two with one name, the place stays."""
    return {**passage.extra, **{name: getattr(passage, name) for name in PLACE}}
