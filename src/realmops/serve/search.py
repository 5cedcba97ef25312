"""Search without answers: ``/v1/search``, OpenAI's ``/v1/embeddings``, Cohere's and Jina's ``/v1/rerank``."""

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.answer import InvalidRequest
from realmops.answering.search import MOST
from realmops.commands.answers import Asked
from realmops.serve.guard import QUESTION_LIMIT, QUESTIONS_LIMIT, own_of

Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
EMBEDDED_LIMIT = 20_000  # characters of a text that is embedded or ranked
RANKED_LIMIT = 256  # texts
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


class RerankRequest(BaseModel):
    """What ``POST /v1/rerank`` takes of Cohere's and Jina's fields; others are read over."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(description="An id of /v1/models.")
    query: Text
    documents: Annotated[
        list[Annotated[str, Field(max_length=EMBEDDED_LIMIT)]], Field(min_length=1, max_length=RANKED_LIMIT)
    ]
    top_n: int | None = Field(None, ge=1, description="How many of them are wanted; without it all.")


@router.post("/v1/search", summary="Find passages", response_model=None)
async def search(request: Request, asked: SearchRequest) -> Response:
    """The best passages with their places, scores of embeddings and of words apart, and where words of the query stand.

    Filters are applied before the best are chosen: with a filter the first k are the first k of what it lets through.
    """
    generation = request.app.state.service.answerer.generation

    def found() -> Response:
        return JSONResponse(
            generation.searching.search(asked.query, asked.k, [asked.filters], asked.by, own_of(request))
        )

    return await _in_a_thread(found)


@router.post("/v1/embeddings", summary="Embed texts (OpenAI)", response_model=None)
async def embeddings(request: Request, call: EmbeddingsRequest) -> Response:
    """Vectors of the retriever: f(x, z) is their inner product, scaled."""
    service = request.app.state.service
    service.known(call.model)
    texts = [call.input] if isinstance(call.input, str) else call.input
    generation = service.answerer.generation

    def found() -> Response:
        searching = generation.searching
        vectors = searching.embed(texts, documents=call.input_type == "document")
        rows = [
            base64.b64encode(row.numpy().tobytes()).decode() if call.encoding_format == "base64" else row.tolist()
            for row in vectors
        ]
        count = sum(len(one.ids) for one in searching.snapshot.tokenizer.encode_batch(texts, add_special_tokens=False))
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": call.model, "usage": usage})

    return await _in_a_thread(found)


@router.post("/v1/rerank", summary="Rank texts (Cohere, Jina)", response_model=None)
async def rerank(request: Request, call: RerankRequest) -> Response:
    """Texts by what the reader finds in them: each one's part of the probability of all spans; the sum is 1."""
    service = request.app.state.service
    service.known(call.model)
    generation = service.answerer.generation

    def found() -> Response:
        generation.check(Asked(call.query))
        scores = generation.model.rerank(call.query, call.documents)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
        results = [{"index": index, "relevance_score": scores[index]} for index in order]
        return JSONResponse({"model": call.model, "results": results})

    return await _in_a_thread(found)


async def _in_a_thread(found: Callable[[], Response]) -> Response:
    """All work of a request, so that others are heard meanwhile; 422 for what the caller got wrong, and only for that.

    Other errors may name files of this machine: they are logged, and the reply is the one of ``app.FAILED``.
    """
    try:
        return await run_in_threadpool(found)
    except InvalidRequest as error:
        raise HTTPException(422, str(error)) from None
