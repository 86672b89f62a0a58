"""A proxy in front of a real Prefect server: counts what is asked, and is slow, wrong or away where a test says so.

What Prefect sends over a WebSocket, its events, goes through untouched, and breaks off when the proxy is away.
"""

import http.client
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.real.s3_proxy import Answer, Request

Fault = Callable[[Request], Answer | None]
"""Answers a request instead of the server; None lets it through."""

_CHUNK = 65536


def no_fault(_: Request) -> Answer | None:
    """Let everything through."""
    return None


def at_random(seed: int, share: float, statuses: Sequence[int] = (503, 429)) -> Fault:
    """Answer a share of all requests with one of these statuses; the seed decides which."""
    chance, lock = random.Random(seed), threading.Lock()

    def fault(_: Request) -> Answer | None:
        with lock:
            return Answer(chance.choice(statuses), b'{"detail": "injected"}') if chance.random() < share else None

    return fault


def on_path(pattern: str, status: int = 500) -> Fault:
    """Answer every request whose method and path, as in `POST /api/flow_runs/`, fit a regular expression."""
    wanted = re.compile(pattern)
    return lambda asked: (
        Answer(status, b'{"detail": "injected"}') if wanted.search(f"{asked.method} {asked.path}") else None
    )


@dataclass
class PrefectProxy:
    """A proxy on a port of its own; `fault` and `delay` (seconds before each answer) may be set at any time."""

    upstream: str
    fault: Fault = no_fault
    delay: float = 0.0
    requests: list[Request] = field(default_factory=list)
    faults: int = 0
    port: int = 0
    _listener: "_Listener | None" = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def start(self) -> None:
        """Take connections, on the same port as before."""
        self._listener = _Listener(self)
        self.port = self._listener.server_port
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Break every connection, and refuse further ones."""
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.break_off()
            self._listener.server_close()
            self._listener = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Refuse connections until the block ends."""
        self.stop()
        try:
            yield
        finally:
            self.start()


@contextmanager
def proxy_to(api_url: str) -> Iterator[PrefectProxy]:
    """Run a proxy until the block ends."""
    proxy = PrefectProxy(urlsplit(api_url).netloc)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: PrefectProxy) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", proxy.port), _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        self._open.discard(request)
        super().shutdown_request(request)

    def break_off(self) -> None:
        """End all connections in the middle of whatever they are at."""
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed and servers that are away are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def handle_any(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = Request(self.command, self.path, len(body))
        proxy.requests.append(asked)
        time.sleep(proxy.delay)
        if self.headers.get("Upgrade", "").lower() == "websocket":
            self._splice(proxy.upstream)
            return
        answer = proxy.fault(asked)
        headers: list[tuple[str, str]] = []
        if answer is None:
            try:
                answer, headers = self._ask(proxy.upstream, body)
            except (OSError, http.client.HTTPException):
                self.close_connection = True
                return
        else:
            proxy.faults += 1
        self.send_response(answer.status)
        for name, value in (*headers, *answer.headers):
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_DELETE = handle_any

    def _ask(self, upstream: str, body: bytes) -> tuple[Answer, list[tuple[str, str]]]:
        connection = http.client.HTTPConnection(upstream, timeout=120)
        try:
            connection.request(self.command, self.path, body=body, headers=dict(self.headers))
            response = connection.getresponse()
            return Answer(response.status, response.read()), response.getheaders()
        finally:
            connection.close()

    def _splice(self, upstream: str) -> None:
        """Send the request on as it came, and then every byte of either side to the other one."""
        self.close_connection = True
        host, port = upstream.split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=30) as there:
            head = f"{self.requestline}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            there.sendall(f"{head}\r\n".encode("latin-1"))
            here = self.connection
            others = {here: there, there: here}
            while True:
                for ready in select.select(list(others), [], [])[0]:
                    data = ready.recv(_CHUNK)
                    if not data:
                        return
                    others[ready].sendall(data)

    def log_message(self, *_: object) -> None:
        pass
