"""Search without answers: ``/v1/search``, and ``/v1/embeddings`` in OpenAI's protocol."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.record import Record
from realmops.answering.search import MOST, Search
from realmops.commands.answers import Generation
from realmops.commands.search import search_of
from realmops.serve.guard import FILTER, QUESTION_LIMIT, QUESTIONS_LIMIT

Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
EMBEDDED_LIMIT = 20_000  # characters of a text that is embedded
router = APIRouter()


class SearchRequest(BaseModel):
    """What ``POST /v1/search`` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    query: Text
    k: int = Field(10, ge=1, le=MOST, description="How many passages.")
    filters: dict[str, Any] = Field(
        default_factory=dict,
        description='Of documents\' fields: a value, a list of which one is enough, or a range as {"gte": 1990}.',
    )
    by: Literal["run", "embeddings", "words"] = Field("run", description="`run` ranks as the run's retriever does.")


class EmbeddingsRequest(BaseModel):
    """What ``POST /v1/embeddings`` takes of OpenAI's fields; others are read over."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(description="An id of /v1/models.")
    input: (
        Annotated[str, Field(max_length=EMBEDDED_LIMIT)]
        | Annotated[
            list[Annotated[str, Field(max_length=EMBEDDED_LIMIT)]], Field(min_length=1, max_length=QUESTIONS_LIMIT)
        ]
    )
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Literal["query", "document"] = Field("query", description="Ours: which of the two towers.")


@lru_cache(1)  # of the one that serves
def _search(generation: Generation) -> Search:
    return search_of(generation)


@router.post("/v1/search", summary="Find passages")
async def search(request: Request, asked: SearchRequest) -> Record:
    """The best passages with their places, scores of embeddings and of words apart, and where words of the query stand.

    Filters are applied before the best are chosen: with a filter the first k are the first k of what it lets through.
    """
    generation = request.app.state.service.answerer.generation

    def found() -> Record:
        own = getattr(request.state, FILTER, {})  # first: what is hidden by it is not even named in an error
        return _search(generation).search(asked.query, asked.k, [own, asked.filters], asked.by)

    try:
        return await run_in_threadpool(found)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


@router.post("/v1/embeddings", summary="Embed texts (OpenAI)")
async def embeddings(request: Request, call: EmbeddingsRequest) -> dict[str, Any]:
    """Vectors of the retriever: f(x, z) is their inner product, scaled."""
    service = request.app.state.service
    service.known(call.model)
    texts = [call.input] if isinstance(call.input, str) else call.input
    searching = _search(service.answerer.generation)
    try:
        vectors = await run_in_threadpool(searching.embed, texts, documents=call.input_type == "document")
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    rows = [
        base64.b64encode(row.numpy().tobytes()).decode() if call.encoding_format == "base64" else row.tolist()
        for row in vectors
    ]
    count = sum(len(one.ids) for one in searching.snapshot.tokenizer.encode_batch(texts, add_special_tokens=False))
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": call.model, "usage": usage}
