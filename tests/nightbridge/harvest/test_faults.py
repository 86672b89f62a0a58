"""A harvest and a fetch through a proxy that breaks every rule of S3: a run is stored whole or not at all.

Each fault comes before one of three S3 servers, which share no code: a printed seed deals them out. With
NIGHTBRIDGE_EVERY_STAGE=1 (`make soak`) each comes before all of them.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.harvest.manifest import run_prefix
from nightbridge.harvest.restore import fetch_run, verify_content, verify_run
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
from tests.flows.moments import SEED, any_of
from tests.nightbridge.harvest.left_run import LeftRun, make_run
from tests.real.s3_proxy import LOST, Answer, Proxy, Request, proxy_to, s3_error
from tests.real.s3_servers import S3Server, ceph_missing_reason, ministack_missing_reason, seaweedfs_missing_reason

pytestmark = pytest.mark.s3

MAX_TRIES = 12
"""Calls after which a harvest or a fetch must have ended well: Prefect repeats the task as often."""

NEVER_COMMITTED = ["manifest.json: missing; this run was never committed"]

Which = Callable[[Request], bool]


@dataclass(frozen=True)
class Fault:
    """What goes wrong on the way. `lasts`: a person has to see to it, and has after the first error."""

    name: str
    install: Callable[[Proxy, random.Random], None]
    kind: type[NightbridgeError] = TransientError
    lasts: bool = False


def page(status: int = 200, body: bytes = b"<html><body>Please log in</body></html>") -> Answer:
    """What a proxy answers instead of S3."""
    return Answer(status, body, (("Content-Type", "text/html"),))


def instead(answer: Answer, share: float, which: Which = lambda _: True) -> Callable[[Proxy, random.Random], None]:
    """A share of the requests never reaches the server."""

    def install(proxy: Proxy, chance: random.Random) -> None:
        proxy.before = lambda request: answer if which(request) and chance.random() < share else None

    return install


def afterwards(answer: Answer, share: float, which: Which = lambda _: True) -> Callable[[Proxy, random.Random], None]:
    """The server does what a share of the requests asks, and another answer comes back."""

    def install(proxy: Proxy, chance: random.Random) -> None:
        proxy.after = lambda request: answer if which(request) and chance.random() < share else None

    return install


def from_request(number: int, answer: Answer) -> Callable[[Proxy, random.Random], None]:
    """Every request from one on is answered so."""

    def install(proxy: Proxy, chance: random.Random) -> None:
        proxy.before = lambda _: answer if len(proxy.requests) > number else None

    return install


def puts(request: Request) -> bool:
    """Whether an object or a part is sent."""
    return request.method == "PUT"


def parts(request: Request) -> bool:
    """Whether a part of an upload is sent."""
    return puts(request) and "partNumber=" in request.path


def creations(request: Request) -> bool:
    """Whether an upload in parts is begun."""
    return request.method == "POST" and request.path.endswith("?uploads")


def completions(request: Request) -> bool:
    """Whether an upload in parts is completed."""
    return request.method == "POST" and "uploadId=" in request.path


def listings(request: Request) -> bool:
    """Whether objects are listed."""
    return request.method == "GET" and "list-type=2" in request.path


def shards(request: Request) -> bool:
    """Whether a checkpoint's bytes are read."""
    return request.method == "GET" and request.path.endswith(".distcp")


def wrong_etags(which: Which, share: float, etag: str) -> Callable[[Proxy, random.Random], None]:
    """A share of the answers has another ETag, or none."""

    def install(proxy: Proxy, chance: random.Random) -> None:
        proxy.etag = lambda request, right: etag if which(request) and chance.random() < share else right

    return install


def flipped_bodies(proxy: Proxy, chance: random.Random) -> None:
    """A byte of a fifth of what is sent changes on the way."""

    def flip(request: Request, body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1]) if body and puts(request) and chance.random() < 0.2 else body

    proxy.damage = flip


def flipped_answers(proxy: Proxy, chance: random.Random) -> None:
    """A byte of a quarter of what is read of the shards changes on the way."""

    def flip(request: Request, body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1]) if body and shards(request) and chance.random() < 0.25 else body

    proxy.change = flip


def cut_answers(proxy: Proxy, chance: random.Random) -> None:
    """Every third answer to a GET breaks off somewhere."""
    proxy.cut = lambda request: chance.randrange(300_000) if proxy.count("GET") % 3 == 0 else None


def slow_answers(proxy: Proxy, chance: random.Random) -> None:
    """Every fifth answer takes its time."""

    def wait(request: Request) -> Answer | None:
        if len(proxy.requests) % 5 == 0:
            time.sleep(0.5)
        return None

    proxy.before = wait


def jumbled_listings(proxy: Proxy, chance: random.Random) -> None:
    """Listings have every object twice and in no order."""

    def jumble(request: Request, body: bytes) -> bytes:
        found = re.findall(rb"<Contents>.*?</Contents>", body, re.DOTALL) if listings(request) else []
        if not found:
            return body
        head, tail = body[: body.index(b"<Contents>")], body[body.rindex(b"</Contents>") + len(b"</Contents>") :]
        doubled = found * 2
        chance.shuffle(doubled)
        return head + b"".join(doubled) + tail

    proxy.change = jumble


def stale_listings(proxy: Proxy, chance: random.Random) -> None:
    """Every other listing has lost its last object."""

    def forget(request: Request, body: bytes) -> bytes:
        if not listings(request) or b"<Contents>" not in body or chance.random() < 0.5:
            return body
        return body[: body.rindex(b"<Contents>")] + body[body.rindex(b"</Contents>") + len(b"</Contents>") :]

    proxy.change = forget


FAULTS = (
    Fault("500", instead(s3_error(500, "InternalError"), 0.15)),
    Fault("503 slow down", instead(s3_error(503, "SlowDown"), 0.15)),
    Fault("429", instead(s3_error(429, "TooManyRequests"), 0.05)),
    Fault("502 with a page", instead(page(502), 0.1)),
    Fault("500 after it was done", afterwards(s3_error(500, "InternalError"), 0.1)),
    Fault("200 with a page instead of anything", instead(page(), 0.1)),
    Fault("200 with a page instead of a PUT", instead(page(), 0.3, puts)),
    Fault("200 with a page instead of a part", instead(page(), 0.5, parts)),
    Fault("200 with a page instead of an upload", instead(page(), 0.5, creations)),
    Fault("200 with a page instead of a completion", instead(page(), 0.5, completions)),
    Fault("200 with a page instead of a listing", instead(page(), 0.5, listings)),
    Fault("200 with JSON", instead(page(body=b'{"status": "ok"}'), 0.1)),
    Fault("connection reset before", instead(LOST, 0.1)),
    Fault("connection reset after", afterwards(LOST, 0.1)),
    Fault("upload forgotten", instead(s3_error(404, "NoSuchUpload"), 0.3, parts)),
    Fault("credentials expire", from_request(8, s3_error(400, "ExpiredToken")), lasts=True),
    Fault("clock skew", from_request(8, s3_error(403, "RequestTimeTooSkewed")), PermanentError, lasts=True),
    Fault("access denied", from_request(8, s3_error(403, "AccessDenied")), PermanentError, lasts=True),
    Fault("redirect", from_request(8, s3_error(301, "PermanentRedirect")), PermanentError, lasts=True),
    Fault("slow answers", slow_answers),
    Fault("wrong ETag of a part", wrong_etags(parts, 0.5, '"00000000000000000000000000000000"')),
    Fault("wrong ETag of an object", wrong_etags(puts, 0.3, '"00000000000000000000000000000000"')),
    Fault("no ETag", wrong_etags(puts, 0.3, "")),
    Fault("flipped bodies", flipped_bodies),
    Fault("flipped answers", flipped_answers),
    Fault("cut answers", cut_answers),
    Fault("doubled and reordered listings", jumbled_listings),
    Fault("listings that lag behind", stale_listings),
)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> LeftRun:
    return make_run(tmp_path_factory.mktemp("workspace"), rest=300_000)


MISSING = {"ceph": ceph_missing_reason, "seaweedfs": seaweedfs_missing_reason, "ministack": ministack_missing_reason}
"""The servers, and why one is not here."""


@pytest.fixture(params=any_of(MISSING))
def server(request: pytest.FixtureRequest, fault: Fault) -> str:
    """The server behind a fault, of those that are here; in CI all have to be."""
    servers: list[str] = request.param.split("/")
    here = [name for name in servers if os.environ.get("CI") == "true" or MISSING[name]() is None] or servers
    chosen = here[(FAULTS.index(fault) + SEED) % len(here)]
    print(f"NIGHTBRIDGE_FAULT_SEED={SEED}: {chosen}")
    return chosen


@pytest.fixture
def proxy(request: pytest.FixtureRequest, server: str) -> Iterator[Proxy]:
    behind: S3Server = request.getfixturevalue(server)
    with proxy_to(behind.endpoint_url) as proxy:
        yield proxy


def test_there_are_at_least_twenty_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_through_every_fault_a_run_is_stored_whole_or_not_at_all_and_comes_back(
    server: str,
    proxy: Proxy,
    settings_of: Callable[[str], StoreSettings],
    left: LeftRun,
    tmp_path: Path,
    fault: Fault,
) -> None:
    settings = settings_of(server)
    direct, prefix = open_store(settings), run_prefix(left.spec, 1)

    def until_done(call: Callable[[], object]) -> None:
        fault.install(proxy, random.Random(17))
        for _ in range(MAX_TRIES):
            try:
                call()
                return
            except fault.kind:
                assert verify_run(direct, prefix) in ([], NEVER_COMMITTED)
                if fault.lasts:
                    proxy.before = lambda _: None
        pytest.fail(f"not done after {MAX_TRIES} calls")

    behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
    until_done(lambda: left.harvest(behind))
    assert verify_content(direct, prefix) == []

    until_done(lambda: fetch_run(behind, prefix, tmp_path / "back"))
    for path in (tmp_path / "back").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == direct.get(f"{prefix}/{path.relative_to(tmp_path / 'back')}"), path
