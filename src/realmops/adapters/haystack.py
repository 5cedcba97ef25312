"""A retriever of Haystack (extra ``haystack``)."""

from pathlib import Path
from typing import Any, Self

from realmops.adapters import check_source, metadata_of, opened
from realmops.api import By, Searcher

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.core.errors import SerializationError
except ImportError as error:
    raise ImportError("this retriever needs haystack-ai: pip install 'realmops[haystack]'") from error


@component
class RealmRetriever:
    """Finds passages by ``searcher``, or by the one that it opens from ``root`` or ``model`` when it is warmed up."""

    def __init__(
        self,
        searcher: Searcher | None = None,
        *,
        root: str | Path | None = None,
        model: str | None = None,
        top_k: int = 10,
        filters: dict[str, Any] | None = None,
        by: By = "run",
    ) -> None:
        check_source(searcher, root, model)
        self.root, self.model, self.top_k, self.filters, self.by = root, model, top_k, filters, by
        self._given, self._opened = searcher, searcher

    def warm_up(self) -> None:
        self._opened = self._opened or opened(self._given, self.root, self.model)

    def to_dict(self) -> dict[str, Any]:
        if self._given is not None:
            raise SerializationError("a retriever that was given a Searcher cannot be written: give it root or model")
        root = None if self.root is None else str(self.root)
        return default_to_dict(self, root=root, model=self.model, top_k=self.top_k, filters=self.filters, by=self.by)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return default_from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """``filters`` and ``top_k`` stand in the place of those that the retriever was made with."""
        self.warm_up()
        assert self._opened is not None
        found = self._opened.search(
            query,
            self.top_k if top_k is None else top_k,
            filters=self.filters if filters is None else filters,
            by=self.by,
        )
        return {
            "documents": [
                Document(id=one.passage_id, content=one.text, meta=metadata_of(one), score=one.score) for one in found
            ]
        }
