"""``realmops serve``: the HTTP server of a model."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from realmops.artifacts import canonical_json
from realmops.serve.model_sources import ModelSource

TOKEN = "REALMOPS_TOKEN"  # the environment variable with the bearer token
CONNECTIONS = 512  # open at a time; requests on more of them get 503
KEEP_ALIVE_SECONDS = 10  # until an idle connection is closed
DRAIN_SECONDS = 30  # for accepted requests after SIGTERM


def read_token(file: Path | None) -> str | None:
    """Read the bearer token from a file, by default from REALMOPS_TOKEN; None if there is neither."""
    if file is not None:
        token, origin = file.read_text(encoding="utf-8").strip(), str(file)
    elif TOKEN in os.environ:
        token, origin = os.environ[TOKEN].strip(), TOKEN
    else:
        return None
    if not token or not token.isascii() or any(map(str.isspace, token)):
        raise ValueError(f"{origin} holds no valid bearer token; expected one word of ASCII characters")
    return token


def serve(
    source: ModelSource,
    *,
    host: str,
    port: int,
    token: str | None,
    every: float,
    log: Callable[[str], None],
) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT, then finish the accepted requests.

    ``port`` 0 is a free one, ``token`` None needs no authentication; a newer one is looked up every ``every`` seconds.
    """
    import uvicorn

    from realmops.serve.app import make_app
    from realmops.serve.batching import RequestBatcher
    from realmops.serve.guard import is_loopback
    from realmops.serve.metrics import Metrics
    from realmops.serve.model_watcher import ModelWatcher

    with _bound(host, port) as bound:
        mark = source.mark()
        served = source.open()
        served.warm_up()
        served.probe()
        metrics = Metrics()
        metrics.show_model(served)
        batcher = RequestBatcher(served, on_batch=metrics.batch)
        watcher = ModelWatcher(source, batcher, mark, metrics.model_changed)
        app = make_app(batcher, watcher, metrics, token)
        gc.freeze()  # a pass over all imported modules would stop requests for a quarter of a second
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                about = canonical_json(served.about).decode()
                log(f"serve: listening on {url} (web page; API reference at /docs); model {about}")

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                app.state.service.is_shutting_down = True
                super().handle_exit(sig, frame)

        if token is None and not is_loopback(host):
            log(f"warning: no bearer token: any client that reaches {host} has access; set --token-file or {TOKEN}")
        watcher.start(every)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            http="h11",
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        try:
            Server(config).run(sockets=[bound])
        finally:
            watcher.stop()
            batcher.close()


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet: clients are refused while the model is opened."""
    with ExitStack() as unused:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = unused.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; use another one") from None
        unused.pop_all()
        return bound
