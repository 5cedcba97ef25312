"""A small web server, and a stand-in for S3."""

import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebServer(ThreadingHTTPServer):
    """Serves ``files``: content and headers by path, or a status; ``gets`` are the paths that were read."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, tuple[bytes, dict[str, str]] | int] = {}
        self.gets: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not isinstance(self.server.files.get(path, 404), int):
            self.server.gets.append(path)
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        entry = self.server.files.get(self.path.partition("?")[0], 404)
        content, headers = (b"", {}) if isinstance(entry, int) else entry
        self.send_response(entry if isinstance(entry, int) else 200)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        return content

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def web_server() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def object_store(bucket: str, keys: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The address of a stand-in for S3 with one bucket, and a client of it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        # Servers of one process share their buckets: those of earlier tests go.
        with urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")):
            pass
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=bucket)
        yield address, client
    finally:
        server.stop()
