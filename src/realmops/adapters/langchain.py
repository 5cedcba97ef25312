"""A retriever of LangChain (extra ``langchain``)."""

from pathlib import Path
from typing import Any

from realmops.adapters import metadata_of, opened
from realmops.api import By, Searcher

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables.config import run_in_executor
    from pydantic import Field, PrivateAttr
except ImportError as error:
    raise ImportError("this retriever needs langchain-core: pip install 'realmops[langchain]'") from error


class RealmRetriever(BaseRetriever):
    """Finds passages by ``searcher``, or by the one that it opens from ``root`` or ``model``.

    The score of a document is in its metadata. A call may have another ``k`` and other ``filters`` in the place of
    these: ``invoke(query, k=3)``, in a chain ``bind(k=3)``.
    """

    root: Path | None = None
    model: str | None = None
    k: int = 10
    filters: dict[str, Any] | None = None
    by: By = "run"
    searcher: Searcher | None = Field(default=None, exclude=True)
    _searcher: Searcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        self._searcher = opened(self.searcher, self.root, self.model)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filters: dict[str, Any] | None = None,
    ) -> list[Document]:
        if k is None:
            k = self.k
        if filters is None:
            filters = self.filters
        return [
            Document(one.text, id=one.passage_id, metadata=metadata_of(one) | {"score": one.score})
            for one in self._searcher.search(query, k, filters=filters, by=self.by)
        ]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **changes: Any
    ) -> list[Document]:
        return await run_in_executor(
            None, self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **changes
        )
