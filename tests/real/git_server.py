"""A real git server over HTTP on loopback: `git http-backend` behind Python's own web server, which counts."""

import base64
import gzip
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class GitServer:
    """A running server. `asked` holds the commands of git's protocol version 2 (gitprotocol-v2(5)) that were asked."""

    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def served_over_http(folder: Path, login: tuple[str, str] | None = None) -> Iterator[GitServer]:
    """Serve the repositories of a folder until the block ends, to everybody or to who has the login alone."""
    state = GitServer()
    expected = "Basic " + base64.b64encode(":".join(login).encode()).decode() if login else None

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            plain = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if plain[4:12] == b"command=":
                # A packet line: four hex digits of its length, then its text (gitprotocol-common(5)).
                state.asked.append(plain[12 : int(plain[:4], 16)].decode().strip())
            if expected and self.headers.get("Authorization") != expected:
                self.send_response(HTTPStatus.UNAUTHORIZED)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            done = subprocess.run(
                ["git", "http-backend"],
                env={
                    "PATH": os.environ["PATH"],
                    "GIT_PROJECT_ROOT": str(folder),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "GIT_CONFIG_COUNT": "1",
                    "GIT_CONFIG_KEY_0": "safe.directory",
                    "GIT_CONFIG_VALUE_0": "*",
                    "REQUEST_METHOD": self.command,
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                    "CONTENT_LENGTH": str(len(body)),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                    "REMOTE_ADDR": "127.0.0.1",
                },
                input=body,
                capture_output=True,
                check=False,
            )
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
