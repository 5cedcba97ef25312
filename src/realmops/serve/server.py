"""``realmops serve``: a model opened, and served over HTTP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from realmops.artifacts import canonical_json
from realmops.serve.served_model import ModelSource, ServedModel

if TYPE_CHECKING:
    from realmops.serve.guard import Limits

TOKEN = "REALMOPS_TOKEN"  # the environment variable with the bearer token
BACKLOG = 128  # connections that are let in at a time: a request is read before so many newer ones end its wait
DRAIN_SECONDS = 30  # for what was accepted, after SIGTERM


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
    source: ModelSource,
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
        every: seconds between two polls for a newer model.
        limits: of connections and requests; None for the usual ones.

    Raises ValueError when the first model cannot be opened, or the port is taken.
    """
    import uvicorn

    from realmops.serve.app import make_app
    from realmops.serve.batching import RequestBatcher
    from realmops.serve.connections import connection_class
    from realmops.serve.guard import Limits, is_loopback
    from realmops.serve.metrics import Metrics
    from realmops.serve.model_watcher import ModelWatcher

    limits = limits or Limits()
    with _bound(host, port) as bound:
        mark = source.mark()
        served = ServedModel.of(source.open())
        served.warm_up()
        served.probe()
        metrics = Metrics()
        metrics.show_model(served)
        batcher = RequestBatcher(served, on_batch=metrics.batch)
        watcher = ModelWatcher(source, batcher, mark, metrics.model_changed)
        app = make_app(batcher, watcher, metrics, token, limits)
        place = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                about = canonical_json(served.about).decode()
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
            batcher.close()


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
