"""``realmops serve`` and ``realmops ask``: one generation opened, then asked over HTTP or once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from realmops.answering.answer import InvalidRequest
from realmops.answering.record import Record
from realmops.artifacts import canonical_json
from realmops.commands.answers import Asked
from realmops.corpus.question_sets import in_languages, read_questions
from realmops.evaluate.exact_match import is_right
from realmops.serve.served_models import Champion, Origin, RunFolder

if TYPE_CHECKING:
    from realmops.serve.guard import Limits

TOKEN = "REALMOPS_TOKEN"  # the environment variable with the bearer token
BACKLOG = 128  # connections that are let in at a time: a request is read before so many newer ones end its wait
DRAIN_SECONDS = 30  # for what was accepted, after SIGTERM


def origin_of(root: Path, model: str | None) -> Origin:
    """Where generations come from: the champion that ``model`` names, else the run's folder."""
    return RunFolder(root) if model is None else Champion(model, root)


def token_of(file: Path | None) -> str | None:
    """The bearer token in a file, else in REALMOPS_TOKEN; None where there is neither. ValueError for an empty one."""
    if file is not None:
        token, place = file.read_text(encoding="utf-8").strip(), str(file)
    elif TOKEN in os.environ:
        token, place = os.environ[TOKEN].strip(), TOKEN
    else:
        return None
    if not token or not token.isascii() or any(map(str.isspace, token)):
        raise ValueError(f"{place} holds no bearer token: one word of ASCII characters is wanted")
    return token


def serve(
    origin: Origin,
    *,
    host: str,
    port: int,
    token: str | None,
    every: float,
    say: Callable[[str], None],
    limits: Limits | None = None,
) -> None:
    """Answer over HTTP until SIGTERM or SIGINT; what was accepted until then is answered.

    Args:
        port: 0 takes a free one.
        every: seconds between two looks for another generation.
        limits: of connections and requests; None for the usual ones.

    Raises ValueError when the first generation cannot be opened, or the port is taken.
    """
    import uvicorn

    from realmops.serve.app import make_app
    from realmops.serve.batching import Answerer
    from realmops.serve.connections import connection_class
    from realmops.serve.guard import Limits, is_loopback
    from realmops.serve.metrics import Metrics
    from realmops.serve.served_models import GenerationWatcher

    limits = limits or Limits()
    with _bound(host, port) as bound:
        mark = origin.mark()
        generation = origin.open()
        generation.quicken()
        generation.probe()
        metrics = Metrics()
        metrics.serves(generation)
        answerer = Answerer(generation, tell=metrics.batch)
        watcher = GenerationWatcher(origin, answerer, mark, metrics.generation)
        app = make_app(answerer, watcher, metrics, token, limits)
        place = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                about = canonical_json(generation.about).decode()
                say(f"{place} answers, in a browser, too; /docs has the routes. Model: {about}")

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                app.state.service.ending = True
                super().handle_exit(sig, frame)

        if token is None and not is_loopback(host):
            say(f"warning: everybody who reaches {host} may ask; --token-file or {TOKEN} names a bearer token")
        watcher.start(every)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=connection_class(limits),
            ws="none",  # its connections would have no limits
            backlog=BACKLOG,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        try:
            Server(config).run(sockets=[bound])
        finally:
            watcher.stop()
            answerer.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet."""
    with ExitStack() as unused:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = unused.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; name others") from None
        unused.pop_all()
        return bound


def ask(
    origin: Origin, questions: Sequence[str], file: Path | None, say: Callable[[str], None] = lambda told: None
) -> Iterator[Record]:
    """The records of questions, and of those of a question file, each answered by itself.

    A question of the file that cannot be asked has a record with ``error`` in its place. Passages that a question was
    made from are not read for it. At the end ``say`` is told the exact match over the file's questions.

    Raises InvalidRequest for another question that cannot be asked, before the first is answered.
    """
    asked = [Asked(text) for text in questions]
    listed = [] if file is None else read_questions([file], format="auto")
    if not asked and not listed:
        raise ValueError("there is nothing to ask: give a question, or --from FILE")
    generation = origin.open()
    generation.probe()
    for one in asked:
        generation.check(one)
    for one in asked:
        yield from generation.answer([one])
    right = 0
    for question in in_languages(listed, generation.model.snapshot.common_languages):
        one = Asked(question.question, question.not_in)
        try:
            generation.check(one)
        except InvalidRequest as error:
            yield {"question": question.question, "error": str(error)}
            continue
        [record] = generation.answer([one])
        right += is_right(record["answer"] or "", question)
        yield record
    if listed:
        say(f"exact match {right / len(listed):.3f}: {right} of {len(listed)} questions of {file} answered right")
