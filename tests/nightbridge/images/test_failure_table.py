"""Every failure of an import that was observed on enroot 4.1.2, and what it means for us.

The scripted enroot repeats what was seen. Where a real one is installed, the same tests make the same failure happen to
it: in the registry's answers, on a small disk, or by a kill.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import check_squashfs
from nightbridge.images.registry import ImageReference, parse_reference
from tests.real.registry import DEMO_CONFIG, member, tar_of, write_layout
from tests.real.s3_proxy import Answer, Proxy, Request, proxy_to


class Enroot(Protocol):
    """An enroot that can be made to fail once, and an image that it can import."""

    reference: ImageReference
    output: Path

    def fail_once(self, fault: str) -> None:
        """Let the next import end with one of the observed failures."""


class Scripted:
    def __init__(self, enroot: Any, folder: Path) -> None:
        self.reference, self.output = parse_reference("nvcr.io/nvidia/nemo:26.02.00"), folder / "image.sqsh"
        self.fail_once = enroot.fail_once


class Real:
    """The installed enroot, with a proxy before the registry that damages answers."""

    def __init__(self, proxy: Proxy, image: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reference = parse_reference(f"{proxy.endpoint_url.removeprefix('http://')}/{image.name}:1")
        self.output = folder / "image.sqsh"
        self._proxy, self._image, self._folder, self._monkeypatch = proxy, image, folder, monkeypatch

    def fail_once(self, fault: str) -> None:
        if fault.isdecimal():
            self._answer("/manifests/", lambda _: Answer(int(fault)))
        elif fault == "blob-429":
            self._answer("/blobs/", lambda _: Answer(429), times=1)
        elif fault in ("corrupted", "truncated"):
            self._damage(fault)
        elif fault == "stalled":
            self._monkeypatch.setenv("ENROOT_TRANSFER_TIMEOUT", "2")
            self._answer("/blobs/", lambda _: time.sleep(6) or Answer(503))  # type: ignore[func-returns-value]
        elif fault == "killed":
            self._answer("/blobs/", self._kill)
        elif fault in ("disk", "cache-disk"):
            self._fill(fault)
        else:
            raise AssertionError(fault)

    def _answer(self, part: str, answer: Callable[[Request], Answer], times: int = 1000) -> None:
        left = [True] * times
        self._proxy.before = lambda request: (
            answer(request) if part in request.path and request.headers.get("user-agent") != "nightbridge" and left
            and left.pop() else None
        )  # fmt: skip

    def _damage(self, fault: str) -> None:
        blobs = self._image.layout / "blobs" / "sha256"
        largest = max(blobs.iterdir(), key=lambda path: path.stat().st_size)
        whole = largest.read_bytes()
        damaged = whole[:-10] if fault == "truncated" else whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
        self._proxy.after = lambda request: Answer(200, damaged) if largest.name in request.path else None

    def _kill(self, _: Request) -> Answer:
        """Kill the enroot that asks: the one program that this process has started, with all that it started."""
        for child in children_of_threads(os.getpid()):
            if b"enroot" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.killpg(child, signal.SIGKILL)
        return Answer(503)

    def _fill(self, fault: str) -> None:
        noise = write_layout(self._folder / "noise", [tar_of([(member("noise"), os.urandom(3 << 20))])], DEMO_CONFIG)
        self._image.registry.push(noise, "team/noise:1")
        self.reference = self.reference.model_copy(update={"name": "team/noise"})
        if fault == "disk":
            self.output = self._folder / "small" / "image.sqsh"
        else:
            self._monkeypatch.setenv("ENROOT_CACHE_PATH", str(self._folder / "small"))


def children_of_threads(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in files for child in path.read_text().split()]


@pytest.fixture(params=["scripted", "real"])
def enroot_that_fails(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Enroot]:
    if request.param == "scripted":
        yield Scripted(request.getfixturevalue("enroot"), tmp_path)
        return
    request.getfixturevalue("real_enroot")
    image = request.getfixturevalue("demo_image")
    with proxy_to(f"http://{image.registry.host}") as proxy:
        yield Real(proxy, image, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("404", InvalidInput, "no such image"),
        ("400", PermanentError, "skopeo copy --format v2s2"),
        ("401", PermanentError, r"machine \S+ login \S+ password"),
        ("403", PermanentError, r"machine \S+ login \S+ password"),
        ("429", TransientError, "busy or failing"),
        ("blob-429", TransientError, "busy or failing"),
        ("500", TransientError, "busy or failing"),
        ("503", TransientError, "busy or failing"),
        ("truncated", TransientError, "corrupted in transit|interrupted"),
        ("corrupted", TransientError, "corrupted in transit"),
        ("stalled", TransientError, "the transfer was interrupted"),
        ("killed", TransientError, "was killed"),
    ],
)
def test_it_has_its_meaning_leaves_nothing_and_the_next_import_succeeds_where_it_may(
    enroot_that_fails: Enroot, fault: str, kind: type[NightbridgeError], message: str, request: pytest.FixtureRequest
) -> None:
    enroot_that_fails.fail_once(fault)
    output = enroot_that_fails.output

    with pytest.raises(NightbridgeError, match=message) as caught:
        find_enroot().import_image(enroot_that_fails.reference, output)

    assert type(caught.value) is kind
    assert not output.exists()
    if kind is TransientError:
        end_fault(enroot_that_fails)
        find_enroot().import_image(enroot_that_fails.reference, output)
        check_squashfs(output)


def end_fault(enroot: Enroot) -> None:
    if isinstance(enroot, Real):
        enroot._proxy.before = enroot._proxy.after = lambda _: None


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("fault", ["disk", "cache-disk"])
def test_a_disk_that_fills_up_is_permanent_and_the_advice_names_the_settings(
    enroot_that_fails: Enroot, fault: str
) -> None:
    enroot_that_fails.fail_once(fault)

    with pytest.raises(PermanentError, match=r"no space left on a disk.*ENROOT_CACHE_PATH, ENROOT_TEMP_PATH"):
        find_enroot().import_image(enroot_that_fails.reference, enroot_that_fails.output)

    assert not enroot_that_fails.output.exists()


def test_an_output_that_is_there_already_is_not_overwritten_by_enroot(enroot_that_fails: Enroot) -> None:
    enroot_that_fails.output.write_text("another import's")

    with pytest.raises(TransientError, match="another import wrote the same file"):
        find_enroot().import_image(enroot_that_fails.reference, enroot_that_fails.output)


@pytest.mark.usefixtures("real_enroot")
def test_enroot_retries_when_a_busy_registry_allows(
    demo_image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_TRANSFER_RETRIES", "2")
    busy = [Answer(429, headers=(("Retry-After", "1"),))]
    with proxy_to(f"http://{demo_image.registry.host}") as proxy:
        proxy.before = lambda request: (
            busy.pop() if busy and "/manifests/" in request.path and "curl" in request.headers["user-agent"] else None
        )
        reference = parse_reference(f"{proxy.endpoint_url.removeprefix('http://')}/{demo_image.name}:1")

        find_enroot().import_image(reference, tmp_path / "image.sqsh")

    assert busy == []
    check_squashfs(tmp_path / "image.sqsh")
