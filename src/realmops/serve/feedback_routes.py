"""Feedback on answers: ``/v1/feedback`` for programs, ``/feedback`` for the page's forms.

It is stored in a file of the run, and sent to MLflow if the run is tracked.
"""

import logging
from dataclasses import asdict
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from realmops.answering.feedback import Feedback, FeedbackFileFull, Rating, append_feedback
from realmops.serve.guard import form_of

_LOG = logging.getLogger(__name__)
router = APIRouter()


def _store(request: Request, rating: Rating) -> None:
    """Store a rating durably, and have it sent; raise HTTPException: 507 full file, 503 not writable."""
    try:
        append_feedback(request.app.state.service.watcher.source.root, Feedback(**asdict(rating)))
    except FeedbackFileFull as error:
        raise HTTPException(507, str(error)) from None
    except OSError as error:
        raise HTTPException(503, f"feedback cannot be saved: {error.strerror}") from None
    try:
        request.app.state.feedback.notify()
    except Exception:  # it is stored, and sent with the next feedback
        _LOG.exception("serve: feedback was not sent to MLflow")


def _refuse_other_sites(request: Request) -> None:
    """Raise HTTPException 403 for a cross-site request; programs send no site."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None:
        site = "same-origin" if urlsplit(origin).netloc == request.headers.get("host") else "cross-site"
    if site not in (None, "same-origin"):
        raise HTTPException(403, "cross-site feedback is not allowed")


@router.post("/v1/feedback", summary="Rate an answer as right or wrong")
def feedback(request: Request, rating: Rating) -> dict[str, bool]:
    """Store feedback with the run. `realmops questions --from-feedback` makes dev questions of it.

    Without an answer, send `answer` as "", `right` as false, and `correct_answer`.
    """
    _refuse_other_sites(request)
    _store(request, rating)
    return {"kept": True}


@router.post("/feedback", include_in_schema=False)
async def from_page(request: Request) -> RedirectResponse:
    """Store feedback of the page's forms, whose question, answer and passage are in the URL; redirect to the page."""
    _refuse_other_sites(request)
    try:
        form = await form_of(request)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    right = form.get("right")
    if right not in ("yes", "no"):
        raise HTTPException(422, "right: expected yes or no")
    query = request.query_params
    corrected = {} if right == "yes" else form
    try:
        rating = Rating(
            question=query.get("q", ""),
            answer=query.get("answer", ""),
            right=right == "yes",
            correct_answer=corrected.get("correct", ""),
            passage_id=query.get("passage", ""),
            correct_passage_id=corrected.get("passage", ""),
        )
    except ValidationError as error:
        raise HTTPException(422, error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    await run_in_threadpool(_store, request, rating)
    return RedirectResponse(f".?{urlencode({'q': rating.question, 'noted': 1})}", 303)
