"""Import with skopeo, umoci and mksquashfs from a real registry: the image that enroot makes, whole or not at all."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import find_importer, pull_image
from nightbridge.images.layers import LAYERS_KEPT_SECONDS
from nightbridge.images.references import ImageReference, parse_reference
from nightbridge.images.squashfs import check_squashfs, sha256_of
from nightbridge.images.standard_tools import StandardTools, explained, find_standard_tools
from nightbridge.models import GitRepo, ImageImport, RunSpec, Site, TestDefinition
from nightbridge.processes import Finished
from tests.real.registry import (
    DEMO_CONFIG,
    PASSWORD,
    USER,
    demo_layers,
    member,
    start_private_registry,
    tar_of,
    write_layout,
)
from tests.real.s3_proxy import LOST, Answer, Proxy, Request, proxy_to
from tests.real.squashfs import RECORDED, content, listing

NOBODY = 65534

pytestmark = pytest.mark.usefixtures("demo_image")


def tools() -> StandardTools:
    found = find_standard_tools()
    assert found is not None
    return found


def run_spec(image: str) -> RunSpec:
    repo = GitRepo(url="https://git.example.org/x.git")
    test = TestDefinition(id="t", name="t", cmd_args={"container_image": image}, git_repos=(repo,), nemo_run_repo=repo)
    return RunSpec(scenario="s", night="2026-11-21", test=test)


@pytest.fixture
def reference(demo_image: Any) -> ImageReference:
    return parse_reference(f"{demo_image.registry.host}/{demo_image.name}@{demo_image.digest}")


@pytest.fixture
def proxy(demo_image: Any) -> Iterator[Proxy]:
    with proxy_to(f"http://{demo_image.registry.host}") as made:
        yield made


def through(proxy: Proxy, demo_image: Any) -> ImageReference:
    host = proxy.endpoint_url.removeprefix("http://")
    return parse_reference(f"{host}/{demo_image.name}@{demo_image.digest}")


# --- the image -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_enroot")
def test_the_image_is_the_one_that_enroot_made(reference: ImageReference, tmp_path: Path) -> None:
    output = tmp_path / "image.sqsh"

    tools().import_image(reference, output)

    check_squashfs(output)
    assert listing(output) == RECORDED["listing"]
    assert content(output, "etc/environment") == RECORDED["environment"]
    assert content(output, "etc/fstab") == RECORDED["fstab"]
    assert content(output, "kept/changed") == "second\n"
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.usefixtures("real_enroot")
def test_a_real_enroot_makes_the_same(reference: ImageReference, tmp_path: Path) -> None:
    find_enroot().import_image(reference, tmp_path / "enroot.sqsh")
    tools().import_image(reference, tmp_path / "tools.sqsh")

    assert listing(tmp_path / "tools.sqsh") == listing(tmp_path / "enroot.sqsh")
    for name in ("etc/environment", "etc/fstab"):
        assert content(tmp_path / "tools.sqsh", name) == content(tmp_path / "enroot.sqsh", name)


@pytest.mark.usefixtures("without_enroot")
def test_a_user_without_root_makes_the_same(reference: ImageReference, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; every other test runs without root here")
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    home = tmp_path / "nobody"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    output, found = home / "image.sqsh", tools()

    # A fork, because another user may not be able to read the Python that runs this; what Python loads only when it
    # first asks a server must be there already.
    assert found.digest(reference) == reference.digest
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.chdir(home)
            del os.environ["ENROOT_CONFIG_PATH"]
            os.environ.update(HOME=str(home), XDG_RUNTIME_DIR=str(home))
            os.environ.update(ENROOT_TEMP_PATH=str(home / "work"), ENROOT_CACHE_PATH=str(home / "cache"))
            try:
                found.import_image(reference, output)
                code = 0
            except NightbridgeError as error:
                (home / "error").write_text(str(error))
        os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (home / "error").read_text()
    assert listing(home / "image.sqsh") == RECORDED["listing"]


@pytest.mark.usefixtures("without_enroot")
def test_a_run_gets_it_by_its_digest_and_the_sidecar_says_who_made_it(demo_image: Any, tmp_path: Path) -> None:
    site = Site(workspace=tmp_path / "workspace")

    image = pull_image(run_spec(f"{demo_image.registry.host}/{demo_image.name}:1"), site)

    assert image.path is not None
    assert image.digest == demo_image.digest
    assert image.path.name == f"{demo_image.digest.removeprefix('sha256:')}.sqsh"
    sidecar = json.loads(image.path.with_suffix(".json").read_text())
    assert sidecar["tool"] == tools().tool
    assert sidecar["tool"].startswith("skopeo ")
    assert {"umoci", "mksquashfs"} < set(sidecar["tool"].split())


def test_enroot_is_taken_where_there_is_one(enroot: Any) -> None:
    assert find_importer().tool == "enroot 4.1.2"


# --- faults ----------------------------------------------------------------------------------------------------------


def is_layer(request: Request) -> bool:
    return request.method == "GET" and "/blobs/" in request.path


def cut(body: bytes) -> bytes:
    return body[:-10]


def flip(body: bytes) -> bytes:
    return body[:-20] + bytes([body[-20] ^ 1]) + body[-19:]


@pytest.mark.usefixtures("without_enroot")
@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(500), TransientError, "busy or out of order"),
        (Answer(503), TransientError, "busy or out of order"),
        (LOST, TransientError, "could not be reached"),
        (Answer(401), PermanentError, "machine 127.0.0.1:.* login USER password"),
        (Answer(403), PermanentError, "machine 127.0.0.1:.* login USER password"),
        (Answer(404), InvalidInput, "no such image"),
    ],
)
@pytest.mark.parametrize("part", ["manifests", "blobs"])
def test_a_fault_of_the_registry_is_understood_and_leaves_nothing(
    proxy: Proxy, demo_image: Any, tmp_path: Path, answer: Answer, kind: type[NightbridgeError], message: str, part: str
) -> None:
    proxy.before = lambda request: answer if f"/{part}/" in request.path else None

    with pytest.raises(kind, match=message) as caught:
        tools().import_image(through(proxy, demo_image), tmp_path / "image.sqsh")

    assert type(caught.value) is kind
    assert not (tmp_path / "image.sqsh").exists()
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.usefixtures("without_enroot")
@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_layer_is_noticed_and_fetched_again_by_the_next_import(
    demo_image: Any, proxy: Proxy, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    blobs = demo_image.layout / "blobs" / "sha256"
    largest = max(blobs.iterdir(), key=lambda path: path.stat().st_size)
    damaged = Answer(200, damage(largest.read_bytes()))
    proxy.after = lambda request: damaged if is_layer(request) and largest.name in request.path else None
    reference = through(proxy, demo_image)

    with pytest.raises(TransientError):
        tools().import_image(reference, tmp_path / "image.sqsh")
    assert not (tmp_path / "image.sqsh").exists()

    proxy.after = lambda _: None
    tools().import_image(reference, tmp_path / "image.sqsh")
    assert listing(tmp_path / "image.sqsh") == RECORDED["listing"]


@pytest.mark.usefixtures("without_enroot")
def test_a_registry_that_is_busy_for_a_moment_is_asked_again(proxy: Proxy, demo_image: Any, tmp_path: Path) -> None:
    busy = [Answer(429)]
    proxy.before = lambda request: busy.pop() if busy and is_layer(request) else None

    tools().import_image(through(proxy, demo_image), tmp_path / "image.sqsh")

    assert listing(tmp_path / "image.sqsh") == RECORDED["listing"]


@pytest.mark.usefixtures("without_enroot")
def test_a_registry_that_nobody_answers_is_transient(demo_image: Any, tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="could not be reached"):
        tools().import_image(
            ImageReference(registry="127.0.0.1:1", name="x", digest=demo_image.digest), tmp_path / "image.sqsh"
        )


@pytest.mark.usefixtures("without_enroot")
def test_a_full_disk_says_which_setting_helps(
    reference: ImageReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(PermanentError, match=r"a disk is full.*ENROOT_TEMP_PATH"):
            tools().import_image(reference, small / "image.sqsh")
        assert list(small.iterdir()) == []
        monkeypatch.setenv("ENROOT_TEMP_PATH", str(small / "work"))
        with pytest.raises(PermanentError, match=r"a disk is full.*ENROOT_TEMP_PATH"):
            tools().import_image(reference, tmp_path / "image.sqsh")
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    ("code", "said", "kind", "message"),
    [
        (-9, "", TransientError, "umoci was killed by signal 9"),
        (3, "", PermanentError, "umoci failed with code 3: it said nothing"),
        (1, "write /x: no space left on device", PermanentError, "a disk is full"),
        (1, "no image found in manifest list for architecture amd64", InvalidInput, "for this kind of machine"),
        (1, "x509: certificate signed by unknown authority", PermanentError, "certificate is not trusted"),
        (1, "toomanyrequests: You have reached your pull rate limit", TransientError, "busy"),
    ],
)
def test_what_a_tool_says_has_a_meaning(
    reference: ImageReference, code: int, said: str, kind: type[NightbridgeError], message: str
) -> None:
    error = explained(Finished(code=code, stdout=b"", stderr=said), "umoci", reference)

    assert type(error) is kind
    assert message in str(error)


@pytest.mark.usefixtures("without_enroot")
def test_too_little_space_is_said_before_anything_is_fetched(proxy: Proxy, demo_image: Any, tmp_path: Path) -> None:
    huge = {"config": {"digest": "x", "size": 5}, "layers": [{"digest": "y", "size": 10**17}]}
    proxy.after = lambda request: Answer(200, json.dumps(huge).encode()) if "/manifests/" in request.path else None

    with pytest.raises(PermanentError, match=r"too little space in /.*: the import needs [\d,]+ bytes, and [\d,]+ are"):
        tools().import_image(through(proxy, demo_image), tmp_path / "image.sqsh")

    assert not [request for request in proxy.requests if "/blobs/" in request.path]


@pytest.mark.usefixtures("without_enroot")
def test_a_transfer_that_gets_stuck_is_killed_and_goes_on(
    proxy: Proxy, demo_image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_TRANSFER_RETRIES", "1")
    stuck, over = [True], threading.Event()

    def hang(request: Request) -> Answer | None:
        if is_layer(request) and stuck:
            stuck.clear()
            over.wait(120)
        return None

    proxy.before = hang
    try:
        tools().model_copy(update={"patience": 5.0}).import_image(through(proxy, demo_image), tmp_path / "image.sqsh")
    finally:
        over.set()

    assert listing(tmp_path / "image.sqsh") == RECORDED["listing"]


# --- layers that are kept --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_enroot")
def test_a_layer_that_another_image_had_is_not_fetched_again(proxy: Proxy, demo_image: Any, tmp_path: Path) -> None:
    first, second = demo_layers()
    newer = write_layout(tmp_path / "newer", [first, second, tar_of([(member("new"), b"new\n")])], DEMO_CONFIG)
    reference = through(proxy, demo_image)
    tools().import_image(reference, tmp_path / "first.sqsh")
    fetched = {request.path.rpartition("/")[2] for request in proxy.requests if is_layer(request)}
    proxy.requests.clear()

    digest = demo_image.registry.push(newer, f"{demo_image.name}:newer")
    tools().import_image(reference.model_copy(update={"digest": digest}), tmp_path / "second.sqsh")

    again = {request.path.rpartition("/")[2] for request in proxy.requests if is_layer(request)}
    assert len(fetched) == 3
    assert len(again) == 2  # its configuration and its third layer
    assert not again & fetched
    assert content(tmp_path / "second.sqsh", "new") == "new\n"


@pytest.mark.usefixtures("without_enroot")
def test_a_kept_layer_that_the_disk_has_spoilt_is_fetched_again(reference: ImageReference, tmp_path: Path) -> None:
    tools().import_image(reference, tmp_path / "first.sqsh")
    largest = max((tmp_path / "cache").rglob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    largest.write_bytes(damaged)

    tools().import_image(reference, tmp_path / "second.sqsh")

    assert listing(tmp_path / "second.sqsh") == RECORDED["listing"]
    assert sha256_of(largest) == largest.name


@pytest.mark.usefixtures("without_enroot")
def test_layers_that_nobody_has_used_for_long_are_removed(reference: ImageReference, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "nightbridge" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / "old").write_text("old")
    os.utime(blobs / "old", (time.time() - LAYERS_KEPT_SECONDS - 60,) * 2)
    (blobs / "younger").write_text("younger")

    tools().import_image(reference, tmp_path / "image.sqsh")

    assert {path.name for path in blobs.iterdir() if len(path.name) < 64} == {"younger"}


# --- a login ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_enroot")
def test_the_login_reaches_skopeo_and_neither_its_arguments_nor_the_disk(
    tmp_path: Path, demo_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = start_private_registry(tmp_path / "private")
    try:
        digest = registry.push(demo_image.layout, "secret:1")
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / ".credentials").write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
        spy = tmp_path / "spy" / "skopeo"
        spy.parent.mkdir()
        spy.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\nexec {shutil.which("skopeo")} "$@"\n')
        spy.chmod(0o755)
        monkeypatch.setenv("PATH", str(spy.parent), prepend=":")

        tools().import_image(
            ImageReference(registry=registry.host, name="secret", digest=digest), tmp_path / "image.sqsh"
        )
    finally:
        registry.stop()

    assert listing(tmp_path / "image.sqsh") == RECORDED["listing"]
    assert PASSWORD not in (tmp_path / "arguments").read_text()
    assert "--src-authfile=/proc/" in (tmp_path / "arguments").read_text()


@pytest.mark.usefixtures("without_enroot")
def test_credentials_of_the_site_open_a_private_registry_and_leave_no_trace(tmp_path: Path, demo_image: Any) -> None:
    registry = start_private_registry(tmp_path / "private")
    lines = f"machine 127.0.0.1 login {USER} password {PASSWORD}"
    try:
        digest = registry.push(demo_image.layout, "secret:1")
        importer = find_standard_tools(ImageImport(), lines)
        assert importer is not None
        image = ImageReference(registry=registry.host, name="secret", tag="1")

        assert importer.digest(image) == digest
        importer.import_image(image, tmp_path / "image.sqsh")
    finally:
        registry.stop()

    assert listing(tmp_path / "image.sqsh") == RECORDED["listing"]
    shown = PASSWORD.encode()
    ours = [path for path in tmp_path.rglob("*") if path.is_file() and "private" not in path.parts]
    assert [path for path in ours if shown in path.read_bytes()] == []
