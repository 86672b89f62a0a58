"""Real servers that take notices, on loopback: SMTP by aiosmtpd, with STARTTLS and a login where asked, and a webhook."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword


@dataclass
class MailServer:
    """A running server: what it has received, and what it answers.

    `answers` are given to the next mails in turn, in place of taking them; `unknown` are recipients that it refuses.
    """

    host: str = "127.0.0.1"
    port: int = 0
    received: list[EmailMessage] = field(default_factory=list)
    envelopes: list[Envelope] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    logins: list[str] = field(default_factory=list)

    async def handle_RCPT(self, server: Any, session: Any, envelope: Envelope, address: str, options: list[str]) -> str:
        if address in self.unknown:
            return "550 no such user here"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        if self.answers:
            return self.answers.pop(0)
        assert isinstance(envelope.content, bytes)
        message = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(message, EmailMessage)
        self.envelopes.append(envelope)
        self.received.append(message)
        return "250 OK"


@contextlib.contextmanager
def mail_server(
    *,
    certificate: tuple[Path, Path] | None = None,
    login: tuple[str, str] | None = None,
    at_once: bool = False,
    port: int = 0,
) -> Iterator[MailServer]:
    """Serve SMTP until the block ends.

    Args:
        certificate: Certificate and key; then nothing is taken in the clear.
        login: User and password without which nothing is taken.
        at_once: Encrypted from the first byte, not after STARTTLS.
        port: A port of one's own choice.
    """
    state = MailServer()
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)

    def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        state.logins.append(data.login.decode())
        return AuthResult(success=(data.login.decode(), data.password.decode()) == login, handled=False)

    class OnAnyPort(Controller):
        def _trigger_server(self) -> None:
            # The library connects once to see that it serves, which with port 0 needs the port that it was given.
            assert isinstance(self.server, asyncio.Server)
            self.port = self.server.sockets[0].getsockname()[1]
            super()._trigger_server()  # type: ignore[no-untyped-call]

    controller = OnAnyPort(
        state,
        hostname=state.host,
        port=port,
        ssl_context=context if at_once else None,
        tls_context=None if at_once else context,
        require_starttls=context is not None and not at_once,
        authenticator=authenticate if login else None,
        auth_required=login is not None,
        auth_require_tls=context is not None and not at_once,
    )
    controller.start()
    state.port = controller.port
    try:
        yield state
    finally:
        controller.stop()


@dataclass
class Webhook:
    """A running web server that takes POSTs; `answers` are the statuses of the next ones, then 200.

    It shows a page to whoever GETs one; of a redirection `moved_to` is the address.
    """

    url: str = ""
    received: list[bytes] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    moved_to: str = ""


@contextlib.contextmanager
def webhook_server(path: str = "/hook") -> Iterator[Webhook]:
    """Serve a webhook at one path until the block ends; 404 elsewhere."""
    state = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = 404 if self.path != path else (state.answers.pop(0) if state.answers else 200)
            if status == 200:
                assert self.headers["Content-Type"] == "application/json"
                state.received.append(body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", state.moved_to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
