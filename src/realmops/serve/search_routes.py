"""Search without answers: ``/v1/search``."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.answer import InvalidRequest
from realmops.answering.passage_search import MOST
from realmops.serve.guard import QUESTION_LIMIT

Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
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


@router.post("/v1/search", summary="Find passages", response_model=None)
def search(request: Request, asked: SearchRequest) -> Response:
    """The best passages with their places, scores of embeddings and of words apart, and where words of the query stand.

    Filters are applied before the best are chosen: with a filter the first k are the first k of what it lets through.
    """
    served = request.app.state.service.batcher.served
    try:
        return JSONResponse(served.shared_search.search(asked.query, asked.k, [asked.filters], asked.by))
    except InvalidRequest as error:
        raise HTTPException(422, str(error)) from None
