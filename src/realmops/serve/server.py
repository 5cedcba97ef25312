"""``realmops serve`` and ``realmops ask``: one generation opened, then asked over HTTP or once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from realmops.artifacts import canonical_json
from realmops.corpus.questions import read_questions
from realmops.serve.answers import Asked, Record
from realmops.serve.generations import Champion, Origin, RunFolder

TOKEN = "REALMOPS_TOKEN"  # the environment variable with the bearer token
CONNECTIONS = 512
DRAIN_SECONDS = 30  # for what was accepted, after SIGTERM
_AROUND = 60  # characters shown on either side of a quotation


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


def serve(origin: Origin, *, host: str, port: int, token: str | None, every: float, say: Callable[[str], None]) -> None:
    """Answer over HTTP until SIGTERM or SIGINT; what was accepted until then is answered.

    Args:
        port: 0 takes a free one.
        every: seconds between two looks for another generation.

    Raises ValueError when the first generation cannot be opened, or the port is taken.
    """
    import uvicorn

    from realmops.serve.app import make_app
    from realmops.serve.batching import Answerer
    from realmops.serve.generations import Keeper
    from realmops.serve.guard import is_loopback
    from realmops.serve.metrics import Metrics

    with _bound(host, port) as bound:
        mark = origin.mark()
        generation = origin.open()
        generation.probe()
        metrics = Metrics()
        metrics.serves(generation)
        answerer = Answerer(generation, watch=metrics)
        keeper = Keeper(origin, answerer, mark, metrics.generation)
        app = make_app(answerer, keeper, metrics, token)
        place = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                about = canonical_json(generation.about).decode()
                say(f"{place} answers, in a browser, too; /docs has the routes. Model: {about}")

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                app.state.desk.ending = True
                super().handle_exit(sig, frame)

        if token is None and not is_loopback(host):
            say(f"warning: everybody who reaches {host} may ask; --token-file or {TOKEN} names a bearer token")
        keeper.start(every)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        try:
            Server(config).run(sockets=[bound])
        finally:
            keeper.stop()
            answerer.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; name others") from None
    return bound


def ask(origin: Origin, questions: Sequence[str], file: Path | None) -> Iterator[Record]:
    """The records of questions, and of those of a question file, each answered by itself.

    Raises ValueError for a question that cannot be asked, before the first is answered.
    """
    texts = [*questions, *([] if file is None else [one.question for one in read_questions([file], format="auto")])]
    if not texts:
        raise ValueError("there is nothing to ask: give a question, or --questions FILE")
    generation = origin.open()
    generation.probe()
    asked = [Asked(text) for text in texts]
    for one in asked:
        generation.check(one)
    for one in asked:
        yield from generation.answer([one])


def short(record: Record) -> list[str]:
    """A record in a few lines: the answer, how sure it is, and each source with the quotation marked."""
    if not record["answer"]:
        return ["no answer"]
    unsure = f", held back below {record['threshold']:.3g}" if record["abstained"] else ""
    lines = [f"{record['answer']}  (p = {record['probability']:.3g}{unsure})"]
    texts = {passage["passage_id"]: passage for passage in record["passages"]}
    for one in record["citations"]:
        passage: dict[str, Any] = texts[one["passage_id"]]
        start, end = one["start"] - passage["start"], one["end"] - passage["start"]
        before, after = passage["text"][max(0, start - _AROUND) : start], passage["text"][end : end + _AROUND]
        shown = " ".join(f"{before}[{one['quote']}]{after}".split())
        lines += [
            f"  {one['title'] or one['document_id']}: {shown}",
            f"    {one['uri']}, characters {one['start']} to {one['end']}, p(z|x) {one['p_z']:.2f}",
        ]
    return lines
