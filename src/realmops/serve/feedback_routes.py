"""Whether answers are right, as people say: ``/v1/feedback`` for programs, ``/feedback`` for the page's buttons.

It is kept in a file of the run, and sent to MLflow where that is in use.
"""

import logging
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.feedback import Feedback, Full, keep
from realmops.serve.guard import FIELDS, QUESTION_LIMIT, form_of
from realmops.tracking.feedback_log import FeedbackSender

_LOG = logging.getLogger(__name__)
Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
router = APIRouter()


class FeedbackRequest(BaseModel):
    """What ``POST /v1/feedback`` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    question: Text
    answer: Text = Field(description="The answer that was given or held back.")
    right: bool
    correct_answer: Text = Field("", description="The right one, where this is not.")
    passage_id: str = Field("", max_length=80, description="The passage that it was quoted from.")


class FeedbackKeeper:
    """Keeps feedback below a run's folder, and has it sent."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sender = FeedbackSender(root)

    def keep(self, request: FeedbackRequest) -> None:
        """Returns when it is durable; HTTPException where it cannot be kept."""
        try:
            keep(self._root, Feedback(**request.model_dump()))
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        except Full as error:
            raise HTTPException(507, str(error)) from None
        except OSError as error:
            raise HTTPException(503, f"feedback cannot be kept here: {error.strerror}") from None
        try:
            self._sender.tell()
        except Exception:  # it is kept; MLflow has it with the next
            _LOG.exception("feedback is not sent to MLflow")


def _refuse_other_sites(request: Request) -> None:
    """403 for what a page of another site sends; programs name no site."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None:
        site = "same-origin" if urlsplit(origin).netloc == request.headers.get("host") else "cross-site"
    if site not in (None, "same-origin"):
        raise HTTPException(403, "a page of another site may not send feedback")


@router.post("/v1/feedback", summary="Say whether an answer is right")
def feedback(request: Request, said: FeedbackRequest) -> dict[str, bool]:
    """It is kept with the run. `realmops questions --from-feedback` makes questions of it."""
    _refuse_other_sites(request)
    request.app.state.feedback.keep(said)
    return {"kept": True}


@router.post("/feedback", include_in_schema=False)
async def from_page(request: Request) -> RedirectResponse:
    """What the page's buttons send: question, answer and passage stand in the address; back to the question."""
    _refuse_other_sites(request)
    try:
        form = await form_of(request)
    except ValueError:
        raise HTTPException(422, f"a form with more than {FIELDS} fields is not read") from None
    right = form.get("right")
    if right not in ("yes", "no"):
        raise HTTPException(422, "right: yes or no is wanted")
    given = request.query_params
    try:
        said = FeedbackRequest(
            question=given.get("q", ""),
            answer=given.get("answer", ""),
            right=right == "yes",
            correct_answer="" if right == "yes" else form.get("correct", ""),
            passage_id=given.get("passage", ""),
        )
    except ValueError:
        raise HTTPException(422, f"a text is longer than {QUESTION_LIMIT} characters") from None
    await run_in_threadpool(request.app.state.feedback.keep, said)
    return RedirectResponse(f".?{urlencode({'q': said.question, 'noted': 1})}", 303)
