"""Notifications: one notice by mail (SMTP), by a webhook, or both, to the recipients in the site's `[notify]`.

Nothing secret leaves here: the password goes to the mail server alone, and errors name the webhook by its host, since
the rest of such a URL is a password.
"""

import http.client
import json
import logging
import platform
import smtplib
import socket
import ssl
import urllib.request
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.masking import mask_text
from nightbridge.models import Model, NotifySettings
from nightbridge.secrets import resolve_secret

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 20.0
"""Timeout of each answer of a mail server or a webhook."""

PATIENCE_SECONDS = 60.0
"""How long each channel is retried after a transient failure."""

LONGEST_CARD = 4000
"""Letters of a notice in Teams: a message over 28 kB is dropped there, and a letter takes up to six bytes as JSON."""

_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 15.0
_PORTS = {"none": 25, "starttls": 587, "tls": 465}
_TRANSIENT_CODES = frozenset({408, 425, 429})

_BlockValue = Callable[[str], str] | None
_Delivery = tuple[str, Callable[[], None]]
"""The recipient, as it is logged, and what sends the notice there once."""


class Notice(Model):
    """What is sent."""

    subject: str
    text: str
    facts: dict[str, Any] = Field({}, description="For programs: they stand beside `text` in a webhook's JSON.")


def notify(
    notice: Notice, settings: NotifySettings, block_value: _BlockValue = None, *, patience: float = PATIENCE_SECONDS
) -> tuple[str, ...]:
    """Send a notice over every channel that is set; a failing channel does not stop the others.

    Args:
        notice: What to send.
        settings: The recipients, and how they are reached.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.
        patience: Seconds for which each channel is retried while its server does not answer, or is busy.

    Returns:
        Where it went; nothing where no channel is set.

    Raises:
        InvalidInput: A secret is not where the settings refer to, or the webhook's is no URL; the rest was sent.
        PermanentError: A server refused it for good; the rest was sent.
        TransientError: A server did not take it in time; the rest was sent.
    """
    sent: list[str] = []
    failed: list[NightbridgeError] = []
    for channel in CHANNELS:
        delivery = channel(notice, settings, block_value)
        if delivery is None:
            continue
        recipient, send = delivery
        try:
            _with_patience(send, patience)
        except NightbridgeError as error:
            failed.append(error)
        else:
            sent.append(recipient)
    if failed:
        first = failed[0]
        others = "".join(f". {error}" for error in failed[1:])
        raise type(first)(first.what, subject=first.subject, advice=f"{first.advice}{others}") from first
    return tuple(sent)


def _with_patience(send: Callable[[], None], patience: float) -> None:
    tries = Retrying(
        retry=retry_if_exception_type(TransientError),
        stop=stop_after_delay(patience),
        wait=wait_exponential(_FIRST_DELAY_SECONDS, max=_LONGEST_DELAY_SECONDS),
        before_sleep=lambda state: log.warning("retrying: %s", state.outcome and state.outcome.exception()),
        reraise=True,
    )
    tries(send)


# --- mail ------------------------------------------------------------------------------------------------------------


def _by_mail(notice: Notice, settings: NotifySettings, block_value: _BlockValue) -> _Delivery | None:
    if settings.smtp_host is None:
        return None
    message = _message(notice, settings)
    return f"mail to {', '.join(settings.mail_to)}", lambda: _send_mail(message, settings, block_value)


def _message(notice: Notice, settings: NotifySettings) -> EmailMessage:
    """The mail, the same one in every try: its Message-ID reveals a duplicate."""
    message = EmailMessage()
    message["Subject"] = " ".join(notice.subject.split())
    message["From"] = settings.mail_from or f"nightbridge@{socket.getfqdn() or platform.node()}"
    message["To"] = ", ".join(settings.mail_to)
    message["Date"] = formatdate(localtime=True)
    message["Message-ID"] = make_msgid("nightbridge", domain=platform.node() or None)
    # Keeps absence replies away.
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(notice.text)
    return message


def _send_mail(message: EmailMessage, settings: NotifySettings, block_value: _BlockValue) -> None:
    password = resolve_secret(settings.smtp_password, block_value) if settings.smtp_password else ""
    where = f"{settings.smtp_host}:{smtp_port(settings)}"
    try:
        refused = _hand_over(message, settings, password)
    except ssl.SSLCertVerificationError as error:
        raise PermanentError(
            f"the mail was not sent: {error.verify_message}", subject=where, advice="Set ca_bundle in [notify]"
        ) from error
    except UnicodeError:
        raise InvalidInput(
            "holds what mail servers do not take: only ASCII", subject="[notify] smtp_user, smtp_password"
        ) from None
    except smtplib.SMTPException as error:
        raise _refused_mail(error, where, password) from error
    except OSError as error:
        raise TransientError(
            f"the mail was not sent: {error.strerror or error or 'no answer'}",
            subject=where,
            advice="Check smtp_host, smtp_port and smtp_security in [notify]",
        ) from error
    if refused:
        raise PermanentError(
            f"the mail was sent, but not to {', '.join(refused)}: refused",
            subject=where,
            advice="Correct mail_to in [notify]",
        )


def _hand_over(message: EmailMessage, settings: NotifySettings, password: str) -> dict[str, tuple[int, bytes]]:
    """Send the mail; returns the recipients that were refused."""
    with _connected(settings) as server:
        if settings.smtp_user is not None:
            server.login(settings.smtp_user, password)
        return server.send_message(message)


def _connected(settings: NotifySettings) -> smtplib.SMTP:
    host, port = str(settings.smtp_host), smtp_port(settings)
    if settings.smtp_security == "tls":
        return smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_SECONDS, context=_trust(settings))
    server = smtplib.SMTP(host, port, timeout=TIMEOUT_SECONDS)
    if settings.smtp_security == "starttls":
        try:
            server.starttls(context=_trust(settings))
        except BaseException:
            server.close()
            raise
    return server


def smtp_port(settings: NotifySettings) -> int:
    """The mail server's port, which follows from its security where none is set."""
    return settings.smtp_port or _PORTS[settings.smtp_security]


def _refused_mail(error: smtplib.SMTPException, where: str, password: str) -> NightbridgeError:
    """A 4xx answer is transient; so is a connection that breaks."""
    answers = [(error.smtp_code, error.smtp_error)] if isinstance(error, smtplib.SMTPResponseException) else []
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        answers = [(code, f"{who}: {_text(answer)}") for who, (code, answer) in error.recipients.items()]
    transient = isinstance(error, smtplib.SMTPServerDisconnected) or any(400 <= code < 500 for code, _ in answers)
    said = "; ".join(f"{code} {_text(answer)}" for code, answer in answers) or str(error)
    return (TransientError if transient else PermanentError)(
        f"the mail was not sent: {mask_text(said, [password])}",
        subject=where,
        advice="Check smtp_security, smtp_user, smtp_password, mail_from and mail_to in [notify]",
    )


def _text(answer: bytes | str) -> str:
    return " ".join((answer.decode(errors="replace") if isinstance(answer, bytes) else answer).split())


# --- webhook ---------------------------------------------------------------------------------------------------------


def _by_webhook(notice: Notice, settings: NotifySettings, block_value: _BlockValue) -> _Delivery | None:
    reference = settings.webhook
    if reference is None:
        return None
    return "webhook", lambda: _call_webhook(notice, resolve_secret(reference, block_value).strip(), _trust(settings))


def _call_webhook(notice: Notice, url: str, trust: ssl.SSLContext) -> None:
    host = host_of(url)
    request = urllib.request.Request(
        url,
        data=json.dumps(_body(notice, host)).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "nightbridge"},
    )
    # Whatever the answer is, it is this webhook's: urllib would follow a redirection, which it does without the notice.
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trust), _EveryAnswer)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            status, reason, other = answer.status, answer.reason, answer.headers.get("Location", "")
    except (OSError, http.client.HTTPException) as error:
        # Not chained: the library's message may hold the whole URL.
        reason = mask_text(str(getattr(error, "reason", error)), [url])
        raise TransientError(
            f"the webhook does not answer: {reason}", subject=host, advice="Check the URL that [notify] webhook names"
        ) from None
    if not 200 <= status < 300:
        transient = status in _TRANSIENT_CODES or status >= 500
        refers = f": it refers to {_place_of(other)}" if status < 400 else ""
        raise (TransientError if transient else PermanentError)(
            f"the webhook answered {status} {reason}{refers}",
            subject=host,
            advice="Check the URL that [notify] webhook names",
        )


def _body(notice: Notice, host: str) -> dict[str, Any]:
    """What a webhook takes. A workflow of Teams accepts anything, and posts an adaptive card alone."""
    if not is_teams(host):
        return {"text": notice.text, **notice.facts}
    text = "\n\n".join(notice.text[:LONGEST_CARD].splitlines())  # Markdown, where a single line break is none
    block = {"type": "TextBlock", "text": text, "wrap": True}
    card = {"type": "AdaptiveCard", "version": "1.2", "body": [block]}
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


class _EveryAnswer(urllib.request.HTTPErrorProcessor):
    """Returns an answer whatever its status is."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        """The answer as it is."""
        return response

    https_response = http_response


def _place_of(url: str) -> str:
    """What may be shown of the address that a webhook refers to."""
    try:
        return f"{urlsplit(url).scheme}://{host_of(url)}"
    except (InvalidInput, ValueError):
        return "another address"


def is_teams(host: str) -> bool:
    """Whether the host of a webhook is that of a workflow of Teams."""
    return host.partition(":")[0].endswith((".logic.azure.com", ".powerplatform.com"))


def host_of(url: str) -> str:
    """The part of a webhook's URL that may be shown.

    Raises:
        InvalidInput: It is no URL of a web server.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url:
            return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    except ValueError:
        pass
    raise InvalidInput("not a URL", subject="[notify] webhook", advice="Name a secret that begins with https://")


def _trust(settings: NotifySettings) -> ssl.SSLContext:
    """Whose certificates count.

    Raises:
        InvalidInput: The file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=settings.ca_bundle)
    except OSError as error:
        raise InvalidInput(
            f"cannot be read as certificates: {error.strerror or error}",
            subject=str(settings.ca_bundle),
            advice="Correct ca_bundle in [notify]",
        ) from error


CHANNELS: Sequence[Callable[[Notice, NotifySettings, _BlockValue], _Delivery | None]] = (_by_mail, _by_webhook)
"""Every way to notify: returns the delivery of a notice, or None where the settings do not name a recipient."""
