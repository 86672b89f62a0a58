"""What a registry's own API answers, and what its refusals mean. The registry is a real one where it can say them."""

import base64
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.images.registry import (
    DOCKER_HUB,
    ImageReference,
    find_login,
    http_is_allowed,
    parse_reference,
    registry_digest,
    registry_tags,
)
from tests.conftest import need
from tests.real.registry import (
    DEMO_CONFIG,
    PASSWORD,
    USER,
    Registry,
    demo_layers,
    missing_reason,
    start_private_registry,
    write_layout,
)
from tests.real.s3_proxy import LOST, Answer, proxy_to

pytestmark = pytest.mark.usefixtures("registry_without_login")


def test_a_tag_and_a_digest_mean_the_manifest_that_was_pushed(demo_image: Any) -> None:
    name = f"{demo_image.registry.host}/{demo_image.name}"

    assert registry_digest(parse_reference(f"{name}:1")) == demo_image.digest
    assert registry_digest(parse_reference(f"{name}@{demo_image.digest}")) == demo_image.digest


def test_the_tags_of_an_image_are_listed(demo_image: Any) -> None:
    assert registry_tags(parse_reference(f"{demo_image.registry.host}/{demo_image.name}")) == ("1",)

    with pytest.raises(InvalidInput, match="no such image"):
        registry_tags(parse_reference(f"{demo_image.registry.host}/{demo_image.name}-other"))


def test_an_image_that_is_not_there_is_invalid_input(demo_image: Any) -> None:
    with pytest.raises(InvalidInput, match=r"no such image.*Check name and tag"):
        registry_digest(parse_reference(f"{demo_image.registry.host}/{demo_image.name}:other"))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(429), TransientError, "busy or failing"),
        (Answer(503), TransientError, "busy or failing"),
        (LOST, TransientError, "unreachable"),
        (Answer(400), PermanentError, "refused the request"),
        (Answer(401), PermanentError, "requires an unsupported login scheme"),
        (Answer(403), PermanentError, r"machine 127\.0\.0\.1:\d+ login USER password"),
    ],
)
def test_a_fault_on_the_way_is_understood(
    demo_image: Any, answer: Answer, kind: type[PermanentError | TransientError], message: str
) -> None:
    with proxy_to(f"http://{demo_image.registry.host}") as proxy:
        proxy.before = lambda _: answer
        host = proxy.endpoint_url.removeprefix("http://")

        with pytest.raises(kind, match=message):
            registry_digest(parse_reference(f"{host}/{demo_image.name}:1"))


def test_a_registry_that_does_not_answer_is_transient() -> None:
    with pytest.raises(TransientError, match=r"unreachable \(127\.0\.0\.1:1: "):
        registry_digest(ImageReference(registry="127.0.0.1:1", name="x"))


# --- logins ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def private_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Registry, str]]:
    """A registry that asks for a login, and the digest of `secret:1` in it."""
    need(missing_reason())
    registry = start_private_registry(tmp_path_factory.mktemp("private") / "r")
    layout = write_layout(tmp_path_factory.mktemp("layout"), demo_layers(), DEMO_CONFIG)
    yield registry, registry.push(layout, "secret:1")
    registry.stop()


def write_netrc(folder: Path, host: str, user: str, password: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".credentials").write_text(f"machine {host} login {user} password {password}\n")


def test_the_login_of_enroot_opens_a_private_registry(private_registry: tuple[Registry, str], tmp_path: Path) -> None:
    registry, digest = private_registry
    reference = parse_reference(f"{registry.host}/secret:1")

    with pytest.raises(PermanentError, match=r"requires a login\. Add a line"):
        registry_digest(reference)
    write_netrc(tmp_path / "config", "127.0.0.1", USER, PASSWORD)
    assert registry_digest(reference) == digest


def test_a_wrong_login_is_refused_without_being_shown(private_registry: tuple[Registry, str], tmp_path: Path) -> None:
    registry, _ = private_registry
    write_netrc(tmp_path / "config", "127.0.0.1", USER, "mistyped-password")

    with pytest.raises(PermanentError, match="refused our credentials") as caught:
        registry_digest(parse_reference(f"{registry.host}/secret:1"))

    assert "mistyped-password" not in str(caught.value)


def test_a_password_may_name_a_variable_as_enroot_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "from-the-environment")
    write_netrc(tmp_path / "config", "nvcr.io", "$oauthtoken", "$A_KEY")

    assert find_login("nvcr.io") == ("$oauthtoken", "from-the-environment")
    assert find_login("quay.io") is None


def test_a_folder_of_enroot_that_cannot_be_looked_into_has_no_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENROOT_CONFIG_PATH", f"/{'long' * 99}")

    assert find_login("quay.io") is None


def test_a_login_lies_where_enroot_conf_says(enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENROOT_CONFIG_PATH", raising=False)
    monkeypatch.delenv("ENROOT_ALLOW_HTTP", raising=False)
    folder = tmp_path / "site-enroot"
    folder.mkdir()
    (folder / ".credentials").write_text("machine nvcr.io login $oauthtoken password one\n")
    enroot.configure(ENROOT_CONFIG_PATH=folder, ENROOT_ALLOW_HTTP="yes")

    assert find_login("nvcr.io") == ("$oauthtoken", "one")
    assert http_is_allowed()


def test_docker_hub_is_found_under_the_name_that_enroot_gives_it(tmp_path: Path) -> None:
    write_netrc(tmp_path / "config", "auth.docker.io", "me", "pass")

    assert find_login(DOCKER_HUB) == ("me", "pass")


def test_a_damaged_file_with_logins_is_named_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / ".credentials").write_text("machine nvcr.io login me password secret-word another-word\n")

    with pytest.raises(PermanentError, match=r"\.credentials: cannot read these logins") as caught:
        find_login("nvcr.io")

    assert "secret-word" not in str(caught.value)
    assert "another-word" not in str(caught.value)
    assert caught.value.__cause__ is None


# --- tokens and pauses, which Debian's registry cannot be made to ask for ---------------------------------------------

MANIFEST = b'{"schemaVersion": 2}'
CHALLENGE = 'Bearer realm="{realm}",service="registry",scope="repository:x:pull"'


class TokenRegistry(http.server.BaseHTTPRequestHandler):
    """Asks for a token, as Docker Hub and nvcr.io do; what it answers besides is set per test."""

    pauses: ClassVar[list[str]] = []
    digest: str | None = None
    challenges: tuple[str, ...] = ()
    manifest: tuple[int, bytes] = (200, MANIFEST)
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        type(self).seen.append((self.path, authorization))
        if self.path.startswith("/token"):
            self._answer(200, b'{"token": "the-token"}')
        elif self.pauses:
            self._answer(429, b"", **{"Retry-After": self.pauses.pop()})
        elif authorization != "Bearer the-token":
            realm = f"http://{self.headers['Host']}/token"
            self._answer(401, b"", **{"WWW-Authenticate": [each.format(realm=realm) for each in self.challenges]})
        elif self.path.startswith("/v2/x/tags/list?n="):
            link = '</v2/x/tags/list?last=b&n=2>; rel="next"'
            self._answer(200, b'{"name": "x", "tags": ["a", "b"]}', Link=link)
        elif self.path == "/v2/x/tags/list?last=b&n=2":
            self._answer(200, b'{"name": "x", "tags": ["c"]}')
        elif self.path.startswith("/v2/page/tags"):
            self._answer(200, b"<html>")
        else:
            status, manifest = self.manifest
            self._answer(status, manifest, **({"Docker-Content-Digest": self.digest} if self.digest else {}))

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, **headers: str | list[str]) -> None:
        self.send_response(status)
        for name, values in headers.items():
            for value in [values] if isinstance(values, str) else values:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def token_registry() -> Iterator[str]:
    TokenRegistry.pauses, TokenRegistry.seen, TokenRegistry.digest = [], [], None
    TokenRegistry.challenges, TokenRegistry.manifest = (CHALLENGE,), (200, MANIFEST)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TokenRegistry)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_token_is_fetched_with_the_login_and_shown_to_the_registry_only(token_registry: str, tmp_path: Path) -> None:
    write_netrc(tmp_path / "config", "127.0.0.1", "me", "pass")
    TokenRegistry.digest = "sha256:" + "ef" * 32

    assert registry_digest(ImageReference(registry=token_registry, name="x", tag="1")) == TokenRegistry.digest
    basic = "Basic " + base64.b64encode(b"me:pass").decode()
    token = "/token?service=registry&scope=repository%3Ax%3Apull"
    assert TokenRegistry.seen == [
        ("/v2/x/manifests/1", ""),
        (token, basic),
        ("/v2/x/manifests/1", "Bearer the-token"),
    ]


def test_a_token_without_encryption_is_not_requested_unless_the_site_allows_it(
    token_registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = ImageReference(registry=token_registry, name="x", tag="1")
    monkeypatch.setattr("nightbridge.images.registry.http_is_allowed", iter([True, False]).__next__)

    with pytest.raises(PermanentError, match="unencrypted"):
        registry_digest(reference)


def test_a_list_of_tags_is_read_to_its_last_page(token_registry: str) -> None:
    assert registry_tags(ImageReference(registry=token_registry, name="x")) == ("a", "b", "c")


def test_what_is_no_list_of_tags_is_refused(token_registry: str) -> None:
    with pytest.raises(DamagedData, match="returned no list of tags"):
        registry_tags(ImageReference(registry=token_registry, name="page"))


def test_without_the_digest_header_the_manifest_is_fetched(token_registry: str) -> None:
    digest = registry_digest(ImageReference(registry=token_registry, name="x", tag="1"))

    assert digest == f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


@pytest.mark.parametrize("answer", [(204, b""), (200, b"<html>log in</html>"), (200, b"[]"), (200, b'{"errors": []}')])
def test_an_answer_that_is_no_manifest_is_not_taken_for_the_image(
    token_registry: str, answer: tuple[int, bytes]
) -> None:
    TokenRegistry.manifest = answer

    with pytest.raises(DamagedData, match="returned no manifest"):
        registry_digest(ImageReference(registry=token_registry, name="x", tag="1"))


@pytest.mark.parametrize(
    "challenges",
    [
        ("Negotiate", CHALLENGE),
        ("NTLM TlRMTVNTUAAC=", 'Basic realm="login"', CHALLENGE),
        (f'Basic realm="login", {CHALLENGE}',),
        (f'{CHALLENGE}, Basic realm="login"',),
        ("Bearer realm={realm},service=registry,scope=repository:x:pull",),
        ('bearer  Realm = "{realm}" , Service="registry", scope="repository:x:pull"',),
    ],
)
def test_a_token_is_asked_for_however_the_registry_says_it(token_registry: str, challenges: tuple[str, ...]) -> None:
    TokenRegistry.challenges = challenges

    assert registry_digest(ImageReference(registry=token_registry, name="x", tag="1")).startswith("sha256:")
    assert TokenRegistry.seen[1] == ("/token?service=registry&scope=repository%3Ax%3Apull", "")


def test_a_digest_of_another_kind_is_refused(token_registry: str) -> None:
    TokenRegistry.digest = "md5:1234"

    with pytest.raises(DamagedData, match="returned an unsupported digest"):
        registry_digest(ImageReference(registry=token_registry, name="x", tag="1"))


def test_a_registry_that_rate_limits_is_retried_after_its_pause(token_registry: str) -> None:
    TokenRegistry.pauses = ["0", "0"]

    assert registry_digest(ImageReference(registry=token_registry, name="x", tag="1")).startswith("sha256:")


@pytest.mark.parametrize("pauses", [["0"] * 9, ["3600"], ["Sat, 21 Nov 2026 04:00:00 GMT"]])
def test_one_that_keeps_rate_limiting_or_for_long_is_left_to_the_stage(token_registry: str, pauses: list[str]) -> None:
    TokenRegistry.pauses = pauses

    with pytest.raises(TransientError, match=r"busy or failing .HTTP 429"):
        registry_digest(ImageReference(registry=token_registry, name="x", tag="1"))
