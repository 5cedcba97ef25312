"""Feedback on answers: ``/v1/feedback`` for programs, ``/feedback`` for the page's forms.

It is stored in a file of the run, and sent to MLflow if the run is tracked.
"""

import logging
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from realmops.answering.feedback import Feedback, FeedbackFileFull, Rating, append_feedback
from realmops.serve.guard import form_of

_LOG = logging.getLogger(__name__)


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


router = APIRouter(dependencies=[Depends(_refuse_other_sites)])


@router.post("/v1/feedback", summary="Rate an answer as right or wrong")
def feedback(request: Request, rating: Rating) -> dict[str, bool]:
    """Store feedback with the run. The command "realmops questions --from-feedback" makes dev questions of it.

    Without an answer, send "answer" as "", "right" as false, and "correct_answer".
    """
    _store(request, rating)
    return {"kept": True}


@router.post("/feedback", include_in_schema=False)
async def from_page(request: Request) -> RedirectResponse:
    """Store feedback of the page's forms, and redirect to the page."""
    try:
        form: dict[str, Any] = await form_of(request)
        rating = Rating(**form | {"right": {"yes": True, "no": False}.get(form.get("right", ""))})
    except (TypeError, ValueError) as error:  # fields that a rating does not have, or without their values
        message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise HTTPException(422, message.removeprefix("Value error, ")) from None
    await run_in_threadpool(_store, request, rating)
    return RedirectResponse(f".?{urlencode({'q': rating.question, 'noted': 1})}", 303)
