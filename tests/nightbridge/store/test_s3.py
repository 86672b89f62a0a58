"""The S3 store where it differs from a directory: credentials, certificates, errors, lost answers."""

import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.models import SecretRef, StoreSettings
from nightbridge.store import s3_client
from nightbridge.store.checksum import FileSource, sha256_hex
from nightbridge.store.s3 import S3Store
from nightbridge.store.s3_client import translate, translate_text
from tests.conftest import BUCKET
from tests.real.s3_proxy import LOST, Answer, proxy_to, s3_error
from tests.real.s3_servers import S3Server, free_port

pytestmark = pytest.mark.s3

MIB = 1 << 20


@pytest.fixture
def ceph_settings(settings_of: Callable[[str], StoreSettings]) -> StoreSettings:
    return settings_of("ceph")


@pytest.fixture
def wrong_secret(monkeypatch: pytest.MonkeyPatch) -> SecretRef:
    monkeypatch.setenv("WRONG_SECRET", "not-the-secret-of-this-key")
    return SecretRef(source="env", name="WRONG_SECRET")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try per request: what fails for good is not waited for."""
    monkeypatch.setitem(s3_client._CONFIG, "retries", {"mode": "standard", "total_max_attempts": 1})


def changed(settings: StoreSettings, **fields: object) -> StoreSettings:
    return settings.model_copy(update=fields)


def test_a_wrong_secret_key_is_permanent_and_never_shown(ceph_settings: StoreSettings, wrong_secret: SecretRef) -> None:
    store = S3Store(changed(ceph_settings, secret_key=wrong_secret))
    for call in (lambda: store.put("a", b""), lambda: store.get("a"), lambda: store.stat("a"), store.check_writable):
        with pytest.raises(PermanentError, match="wrong secret key") as caught:
            call()
        assert "not-the-secret" not in str(caught.value)
        assert store.url in caught.value.subject


def test_an_unknown_access_key_is_permanent(ceph_settings: StoreSettings, wrong_secret: SecretRef) -> None:
    store = S3Store(changed(ceph_settings, access_key=wrong_secret))
    with pytest.raises(PermanentError, match="unknown access key"):
        store.stat("a")


def test_a_missing_bucket_is_permanent_for_reading_too(ceph_settings: StoreSettings, tmp_path: Path) -> None:
    store = S3Store(changed(ceph_settings, url="s3://no-such-bucket-here/p"))
    (tmp_path / "f").write_bytes(b"x")
    for call in (
        store.check_writable,
        lambda: store.put_if_absent("a", b""),
        lambda: store.put_file("a", FileSource(tmp_path / "f")),
        lambda: store.get("a"),
        lambda: store.stat("a"),
        lambda: list(store.list("a")),
    ):
        with pytest.raises(PermanentError, match=r"no such bucket.*Create the bucket"):
            call()


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_answer_is_transient(ceph_settings: StoreSettings) -> None:
    store = S3Store(changed(ceph_settings, endpoint_url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(TransientError, match=r"unreachable.*Check the endpoint"):
        store.get("a")


@pytest.mark.usefixtures("impatient")
def test_an_untrusted_certificate_is_permanent(ceph: S3Server, ceph_settings: StoreSettings) -> None:
    store = S3Store(changed(ceph_settings, endpoint_url=ceph.https_url))
    with pytest.raises(PermanentError, match=r"certificate is not trusted.*ca_bundle"):
        store.get("a")


def test_the_environments_ca_bundle_spoils_neither_http_nor_an_own_authority(
    ceph: S3Server, ceph_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.pem").write_text("no certificate")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "broken.pem"))
    S3Store(ceph_settings).put("over-http", b"1")
    S3Store(changed(ceph_settings, endpoint_url=ceph.https_url, ca_bundle=ceph.ca_bundle)).put("over-https", b"2")


def test_credentials_are_found_where_boto3_looks(
    ceph: S3Server, ceph_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text(
        f"[night]\naws_access_key_id={ceph.access_key}\naws_secret_access_key={ceph.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    S3Store(changed(ceph_settings, access_key=None, secret_key=None, profile="night")).put("a", b"")
    with pytest.raises(InvalidInput, match="day"):
        S3Store(changed(ceph_settings, profile="day"))


def test_no_credentials_at_all_is_permanent(
    ceph_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PermanentError, match="no S3 credentials found"):
        S3Store(changed(ceph_settings, access_key=None, secret_key=None)).get("a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"secret_key": None}, "go together"),
        ({"secret_key": SecretRef(source="env", name="UNSET_VARIABLE")}, "UNSET_VARIABLE"),
        ({"ca_bundle": Path("/no/such.pem")}, "no/such.pem"),
        ({"ca_bundle": Path(f"/{'long' * 99}.pem")}, r"long\.pem: ca_bundle: no such file"),
        ({"kms_key_id": "a-key"}, "goes with encryption"),
        ({"storage_class": "DEEP_ARCHIVE"}, "cannot be read back immediately"),
        ({"endpoint_url": "not a url"}, "not a url"),
    ],
)
def test_settings_that_cannot_work_are_invalid_input(
    ceph_settings: StoreSettings, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        S3Store(changed(ceph_settings, **fields))


def test_every_request_goes_to_the_configured_server(
    ceph: S3Server, ceph_settings: StoreSettings, tmp_path: Path
) -> None:
    data = b"x" * (20 * MIB)
    (tmp_path / "big").write_bytes(data)
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        store.put_file("big", FileSource(tmp_path / "big"))
        parts = sorted(request.size for request in proxy.requests if "partNumber=" in request.path)
    assert parts == [4 * MIB, 8 * MIB, 8 * MIB]
    assert S3Store(ceph_settings).get("big") == data


def test_a_winner_whose_answer_was_lost_is_told_that_it_won(ceph: S3Server, ceph_settings: StoreSettings) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        proxy.after = lambda request: LOST if proxy.count("PUT") == 1 else None
        assert store.put_if_absent("manifest.json", b"ours")
        assert proxy.count("PUT") == 2
        assert not store.put_if_absent("manifest.json", b"theirs")


def test_a_winner_that_heard_no_answer_at_all_wins_with_its_next_call(
    ceph: S3Server, ceph_settings: StoreSettings
) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        proxy.after = lambda _: LOST
        with pytest.raises(TransientError):
            store.put_if_absent("manifest.json", b"ours")
        proxy.after = lambda _: None
        assert store.get("manifest.json") == b"ours"
        assert S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url)).put_if_absent("manifest.json", b"ours")
        assert not store.put_if_absent("manifest.json", b"theirs")


def test_a_conflict_with_another_writer_is_asked_again(ceph: S3Server, ceph_settings: StoreSettings) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        proxy.before = lambda request: (
            s3_error(409, "ConditionalRequestConflict") if request.method == "PUT" and proxy.count("PUT") == 1 else None
        )
        assert store.put_if_absent("manifest.json", b"ours")
        assert proxy.count("PUT") == 2


def test_a_server_that_ignores_the_condition_is_refused(ministack: S3Server) -> None:
    with proxy_to(ministack.endpoint_url) as proxy:
        store = S3Store(ministack.store_settings(BUCKET, endpoint_url=proxy.endpoint_url))
        second = hashlib.md5(b"second", usedforsecurity=False).hexdigest()
        stored = Answer(200, headers=(("x-amz-request-id", "1"), ("ETag", f'"{second}"')))
        answers = iter([None, stored])
        proxy.before = lambda request: next(answers) if request.method == "PUT" else None
        with pytest.raises(PermanentError, match="ignores `If-None-Match"):
            store.check_writable()


def test_so_is_ceph_in_a_bucket_with_versioning_which_makes_it_ignore_the_condition(
    ceph: S3Server, ceph_settings: StoreSettings
) -> None:
    bucket = f"versions-{uuid.uuid4().hex[:8]}"
    ceph.make_bucket(bucket)
    ceph.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with pytest.raises(PermanentError, match="Ceph in a bucket without versioning"):
        S3Store(changed(ceph_settings, url=f"s3://{bucket}")).check_writable()


def test_what_a_server_says_it_has_stored_and_has_not_is_no_success(ministack: S3Server) -> None:
    with proxy_to(ministack.endpoint_url) as proxy:
        store = S3Store(ministack.store_settings(BUCKET, endpoint_url=proxy.endpoint_url))
        stored = Answer(200, headers=(("x-amz-request-id", "1"), ("ETag", '"1"')))
        proxy.before = lambda request: stored if request.method == "PUT" else None
        for put in (store.put, store.put_if_absent):
            with pytest.raises(TransientError, match="ETag 1 for bytes whose MD5 is"):
                put("a", b"bytes")


def test_a_server_that_takes_damaged_bytes_is_refused(ceph: S3Server, ceph_settings: StoreSettings) -> None:
    S3Store(ceph_settings).check_writable()
    S3Store(changed(ceph_settings, endpoint_url=ceph.https_url, ca_bundle=ceph.ca_bundle)).check_writable()
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        told = hashlib.sha256(b"sent").hexdigest()
        proxy.before = lambda request: Answer(200) if request.headers.get("x-amz-content-sha256") == told else None
        with pytest.raises(PermanentError, match="corruption in transit goes unnoticed"):
            store.check_writable()
    assert list(S3Store(ceph_settings).list("")) == []


def test_an_upload_survives_a_busy_server_and_a_lost_part(
    ceph: S3Server, ceph_settings: StoreSettings, tmp_path: Path
) -> None:
    data = os.urandom(20 * MIB)
    (tmp_path / "big").write_bytes(data)
    faults = [s3_error(503, "SlowDown"), LOST, s3_error(500, "InternalError")]
    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.before = lambda request: faults.pop() if faults and request.method == "PUT" else None
        S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url)).put_file("b", FileSource(tmp_path / "big"))
    assert not faults
    assert S3Store(ceph_settings).get("b") == data


def test_credentials_that_expire_are_transient_also_where_the_answer_has_no_body(
    ceph: S3Server, ceph_settings: StoreSettings
) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = S3Store(changed(ceph_settings, endpoint_url=proxy.endpoint_url))
        proxy.before = lambda _: s3_error(400, "ExpiredToken")
        for call in (store.stat, store.get):
            with pytest.raises(TransientError, match="credentials have expired"):
                call("a")


def test_folders_that_a_console_or_a_mount_has_marked_are_no_objects(
    ministack: S3Server, settings_of: Callable[[str], StoreSettings]
) -> None:
    settings = settings_of("ministack")
    store, client = S3Store(settings), ministack.client()
    for marker in ("", "decisions/", "runs/llama/n1/llama-n1-0123456789/"):
        client.put_object(Bucket=BUCKET, Key=f"{store.prefix}{marker}", Body=b"")
    store.put("runs/llama/n1/llama-n1-0123456789/a1/manifest.json", b"{}")
    assert [found.key for found in store.list("")] == ["runs/llama/n1/llama-n1-0123456789/a1/manifest.json"]
    assert list(store.list("decisions")) == []


def test_an_object_damaged_on_its_way_back_is_read_again(ministack: S3Server) -> None:
    direct = S3Store(ministack.store_settings(BUCKET, "damaged-on-its-way"))
    direct.put("a", b"content")
    with proxy_to(ministack.endpoint_url) as proxy:
        behind = S3Store(ministack.store_settings(BUCKET, "damaged-on-its-way", endpoint_url=proxy.endpoint_url))
        proxy.change = lambda request, body: b"CONTENT" if proxy.count("GET") == 1 else body
        assert behind.get("a") == b"content"
        proxy.change = lambda request, body: b"CONTENT"
        with pytest.raises(NightbridgeError, match="its sha256 is"):
            behind.get("a")


def test_an_object_damaged_in_the_store_is_noticed(ceph: S3Server, ceph_settings: StoreSettings) -> None:
    store = S3Store(ceph_settings)
    ceph.client().put_object(
        Bucket=store.bucket, Key=f"{store.prefix}a", Body=b"rotten", Metadata={"sha256": sha256_hex(b"sound!")}
    )
    with pytest.raises(NightbridgeError, match="its sha256 is"):
        store.get("a")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchBucket", 404, PermanentError),
        ("AccessDenied", 403, PermanentError),
        ("InvalidAccessKeyId", 403, PermanentError),
        ("SignatureDoesNotMatch", 403, PermanentError),
        ("QuotaExceeded", 403, PermanentError),
        ("RequestTimeTooSkewed", 403, PermanentError),
        ("SomethingNew", 400, PermanentError),
        ("NotImplemented", 501, PermanentError),
        ("SlowDown", 503, TransientError),
        ("InternalError", 500, TransientError),
        ("ExpiredToken", 400, TransientError),
        ("RequestTimeout", 400, TransientError),
        ("SomethingNew", 502, TransientError),
        ("SlowDownWrite", 503, TransientError),
        ("429", 429, TransientError),
    ],
)
def test_what_passes_with_time_is_transient_and_all_else_is_not(
    code: str, status: int, kind: type[NightbridgeError]
) -> None:
    answer = {"Error": {"Code": code, "Message": "said so"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    body = f"<Error><Code>{code}</Code><Message>said so</Message></Error>"
    text = f"Error performing PUT http://s3/b/k - Server returned non-2xx status code: {status} Whatever: {body}"
    for error in (translate(ClientError(answer, "PutObject"), "s3://b/k"), translate_text(text, "s3://b/k")):
        assert type(error) is kind
        assert error.subject == "s3://b/k"
        assert error.advice
        assert "said so" in error.what
