"""Passage search: ``/v1/search``."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.passage_search import MAX_RESULTS, PassageQuery
from realmops.serve.guard import QUESTION_LIMIT

Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
router = APIRouter()


class SearchRequest(BaseModel):
    """Body of ``POST /v1/search``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    query: Text
    k: int = Field(10, ge=1, le=MAX_RESULTS, description="Number of passages.")
    filters: dict[str, Any] = Field(
        default_factory=dict,
        description='By document field: a value, a list of allowed values, or a range as {"gte": 1990}.',
    )
    by: Literal["run", "embeddings", "words"] = Field("run", description="`run` ranks by the run's own retriever.")


@router.post("/v1/search", summary="Find passages", response_model=None)
async def search(request: Request, body: SearchRequest) -> Response:
    """Return the best passages with their documents, dense and BM25 scores, and the positions of query words.

    Filters are applied before ranking: the result is the top k of the passages that match.
    """
    query = PassageQuery(body.query, body.k, [body.filters], body.by)
    return JSONResponse(await request.app.state.service.search(query))
