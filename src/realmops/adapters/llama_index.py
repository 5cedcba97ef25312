"""A retriever of LlamaIndex (extra ``llama-index``)."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realmops.adapters import IDS, metadata_of, opened
from realmops.api import By, Passage, Searcher

try:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
except ImportError as error:
    raise ImportError("this retriever needs llama-index-core: pip install 'realmops[llama-index]'") from error


class RealmRetriever(BaseRetriever):
    """Finds passages by ``searcher``, or by the one that it opens from ``root`` or ``model``."""

    def __init__(
        self,
        searcher: Searcher | None = None,
        *,
        root: str | Path | None = None,
        model: str | None = None,
        k: int = 10,
        filters: Mapping[str, Any] | None = None,
        by: By = "run",
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager)
        self.k, self.filters, self.by = k, filters, by
        self._searcher = opened(searcher, root, model)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._searcher.search(query_bundle.query_str, self.k, filters=self.filters, by=self.by)
        return [NodeWithScore(node=_node(one), score=one.score) for one in found]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _node(passage: Passage) -> TextNode:
    """A passage whose source is its document."""
    return TextNode(
        id_=passage.passage_id,
        text=passage.text,
        start_char_idx=passage.start,
        end_char_idx=passage.end,
        metadata=metadata_of(passage),
        excluded_llm_metadata_keys=list(IDS),
        excluded_embed_metadata_keys=list(IDS),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=passage.document_id)},
    )
