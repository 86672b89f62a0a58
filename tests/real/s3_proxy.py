"""A proxy in front of a real S3 server: counts what is asked, and loses or replaces answers where a test says so."""

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """One request that came by."""

    method: str
    path: str
    size: int
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By lower-case name."""


@dataclass(frozen=True)
class Answer:
    """An answer that the proxy gives itself; `None` of it means: the answer is lost on the way."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("x-amz-request-id", "injected"),)


LOST = Answer(0)


def s3_error(status: int, code: str) -> Answer:
    """An error as S3 writes it."""
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    return Answer(status, text.encode())


@dataclass
class Proxy:
    """`before` answers instead of the server, `after` instead of the answer that the server gave; None leaves it be.

    `damage` changes the body on its way to the server, `change` the server's answer on its way back, `etag` the ETag
    in its headers, and `cut` says after how many bytes of it the connection breaks.
    """

    endpoint_url: str = ""
    requests: list[Request] = field(default_factory=list)
    before: Callable[[Request], Answer | None] = lambda _: None
    after: Callable[[Request], Answer | None] = lambda _: None
    damage: Callable[[Request, bytes], bytes] = lambda _, body: body
    change: Callable[[Request, bytes], bytes] = lambda _, body: body
    etag: Callable[[Request, str], str] = lambda _, etag: etag
    """An empty one: the answer has no ETag."""
    cut: Callable[[Request], int | None] = lambda _: None

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)


@contextmanager
def proxy_to(endpoint_url: str) -> Iterator[Proxy]:
    """Run a proxy on a free port until the block ends."""
    upstream = urlsplit(endpoint_url).netloc
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            sent = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, len(body), sent)
            proxy.requests.append(request)
            answer = proxy.before(request)
            headers: list[tuple[str, str]] = []
            if answer is None:
                # The signature covers the Host header: it goes through unchanged.
                connection = http.client.HTTPConnection(upstream, timeout=30)
                connection.request(
                    self.command, self.path, body=proxy.damage(request, body), headers=dict(self.headers)
                )
                response = connection.getresponse()
                headers = [
                    (name, proxy.etag(request, value) if name.lower() == "etag" else value)
                    for name, value in response.getheaders()
                ]
                answer = proxy.after(request) or Answer(response.status, proxy.change(request, response.read()), ())
                connection.close()
            if answer is LOST:
                self.close_connection = True
                return
            self.send_response(answer.status)
            length = next((value for name, value in headers if name.lower() == "content-length"), None)
            for name, value in (*headers, *answer.headers):
                if value and name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                kept = proxy.cut(request)
                self.wfile.write(answer.body[:kept])
                self.close_connection = self.close_connection or kept is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.endpoint_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
