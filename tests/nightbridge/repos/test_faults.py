"""A real git server whose answers are lost, cut off, damaged or refused: what may pass passes, and nothing half stays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import AccessRefused, InvalidInput, NightbridgeError, TransientError
from nightbridge.repos.checkouts import check_out, find_changes
from nightbridge.repos.mirrors import Mirror
from tests.real.git_server import served_over_http
from tests.real.s3_proxy import LOST, Answer, Proxy, Request, proxy_to

pytestmark = pytest.mark.thorough

PACK = b"PACK"


@pytest.fixture
def proxy(origin: Any, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy before a server with `origin`'s repository, whose objects do not pack well."""
    origin.commit(
        "Large",
        {f"noise{number}": "".join(chr(33 + (number * i * i) % 90) for i in range(9000)) for number in range(9)},
    )
    served = tmp_path / "served"
    served.mkdir()
    (served / "Megatron-Bridge").symlink_to(origin.path / ".git")
    with served_over_http(served) as server, proxy_to(server.url) as made:
        yield made


@pytest.fixture
def mirror(proxy: Proxy, workspace: Path) -> Mirror:
    return Mirror(f"{proxy.endpoint_url}/Megatron-Bridge", workspace, timeout=60)


def is_refs(request: Request) -> bool:
    return request.path.endswith("/info/refs?service=git-upload-pack")


def is_command(request: Request) -> bool:
    return request.method == "POST"


def answer_with(answer: Answer, to: Callable[[Request], bool]) -> Callable[[Proxy], None]:
    def arm(proxy: Proxy) -> None:
        proxy.before = lambda request: answer if to(request) else None

    return arm


def damage_packs(damage: Callable[[bytes], bytes]) -> Callable[[Proxy], None]:
    """Let packs, which are what a fetch transfers, go through another way of the proxy, damaged."""

    def arm(proxy: Proxy) -> None:
        proxy.change = lambda _, body: damage(body) if PACK in body else body

    return arm


def flip(body: bytes) -> bytes:
    middle = body.index(PACK) + (len(body) - body.index(PACK)) // 2
    return body[:middle] + bytes([body[middle] ^ 0x55]) + body[middle + 1 :]


FAULTS = {
    "503 instead of the refs": (answer_with(Answer(503), is_refs), TransientError),
    "429 instead of the refs": (answer_with(Answer(429), is_refs), TransientError),
    "500 instead of the objects": (answer_with(Answer(500), is_command), TransientError),
    "no answer with the refs": (answer_with(LOST, is_refs), TransientError),
    "no answer with the objects": (answer_with(LOST, is_command), TransientError),
    "an early end": (damage_packs(lambda body: body[: body.index(PACK) + 200]), TransientError),
    "a damaged byte": (damage_packs(flip), TransientError),
    "401": (answer_with(Answer(401, headers=(("WWW-Authenticate", 'Basic realm="git"'),)), is_refs), AccessRefused),
    "403": (answer_with(Answer(403), is_refs), AccessRefused),
    "404": (answer_with(Answer(404), is_refs), InvalidInput),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", [True, False])
def test_it_is_classified_and_the_next_fetch_gets_everything(
    origin: Any, mirror: Mirror, proxy: Proxy, workspace: Path, fault: str, first: bool
) -> None:
    arm, kind = FAULTS[fault]
    if not first:
        mirror.resolve("main")
        origin.commit("New", {"noise1": "new " * 9000, "noise2": "other " * 9000})
    before = sorted(path.name for path in (workspace / "repos").glob("*.git"))
    arm(proxy)

    with pytest.raises(NightbridgeError) as caught:
        mirror.resolve("main")

    assert type(caught.value) is kind
    assert sorted(path.name for path in (workspace / "repos").iterdir()) == before
    proxy.before, proxy.change = (lambda _: None), (lambda _, body: body)
    commit = mirror.resolve("main")
    assert commit == origin.git("rev-parse", "main")
    assert mirror.damage() == []
    assert find_changes(check_out(mirror, "main", commit, workspace).path, commit) == []
