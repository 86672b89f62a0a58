"""What the store's settings make of the requests: recorded on their way to a real server."""

import base64
import dataclasses
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.auth
import pytest

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.models import StoreSettings
from nightbridge.store.checksum import PART_SIZE, FileSource
from nightbridge.store.s3 import S3Store
from nightbridge.store.s3_client import translate_text
from tests.conftest import BUCKET
from tests.real.s3_proxy import Answer, Proxy, Request, proxy_to, s3_error
from tests.real.s3_servers import S3Server

pytestmark = pytest.mark.s3

SENT_AS = {
    "encryption": "x-amz-server-side-encryption",
    "kms_key_id": "x-amz-server-side-encryption-aws-kms-key-id",
    "tags": "x-amz-tagging",
    "storage_class": "x-amz-storage-class",
}


def store_behind(proxy: Proxy, settings: StoreSettings, **fields: Any) -> S3Store:
    return S3Store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url, **fields}))


def write_every_way(store: S3Store, folder: Path) -> None:
    """A small object, an exclusive one, a small file and one in parts."""
    (folder / "small").write_bytes(b"x")
    (folder / "large").write_bytes(b"x" * (PART_SIZE + 1))
    store.put("record.json", b"{}")
    store.put_if_absent("manifest.json", b"{}")
    store.put_file("small", FileSource(folder / "small"))
    store.put_file("large", FileSource(folder / "large"))


def makes_an_object(request: Request) -> bool:
    return (request.method == "PUT" and "partNumber" not in request.path and "?tagging" not in request.path) or (
        request.method == "POST" and request.path.endswith("?uploads")
    )


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"encryption": "AES256"}, {"encryption": "AES256"}),
        (
            {"encryption": "aws:kms", "kms_key_id": "arn:aws:kms:eu:1:key/k"},
            {"encryption": "aws:kms", "kms_key_id": "arn:aws:kms:eu:1:key/k"},
        ),
        ({"tags": {"team": "llm&co"}}, {"tags": "team=llm%26co"}),
        ({}, {}),
    ],
    ids=["AES256", "KMS", "tags", "nothing"],
)
def test_every_request_that_makes_an_object_asks_for_encryption_and_tags(
    ministack: S3Server, settings_of: Any, tmp_path: Path, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    with proxy_to(ministack.endpoint_url) as proxy:
        write_every_way(store_behind(proxy, settings_of("ministack"), **fields), tmp_path)
        made = [request for request in proxy.requests if makes_an_object(request)]
    assert len(made) == 4
    for request in made:
        assert {name: request.headers[sent] for name, sent in SENT_AS.items() if sent in request.headers} == headers


def test_the_storage_class_is_for_a_runs_files_and_not_for_what_is_read_every_night(
    ministack: S3Server, settings_of: Any, tmp_path: Path
) -> None:
    with proxy_to(ministack.endpoint_url) as proxy:
        write_every_way(store_behind(proxy, settings_of("ministack"), storage_class="STANDARD_IA"), tmp_path)
        classes = {
            request.path.partition("?")[0].rpartition("/")[2]: request.headers.get(SENT_AS["storage_class"])
            for request in proxy.requests
            if makes_an_object(request)
        }
    assert classes == {"record.json": None, "manifest.json": None, "small": "STANDARD_IA", "large": "STANDARD_IA"}


@pytest.mark.parametrize("by_boto3", [False, True])
def test_a_bucket_with_object_lock_gets_the_checksums_that_it_asks_for(
    ministack: S3Server, settings_of: Any, tmp_path: Path, by_boto3: bool
) -> None:
    """AWS refuses bytes without one where the bucket has a default retention."""

    def refuse(request: Request) -> Answer | None:
        has_checksum = any(name.startswith(("content-md5", "x-amz-checksum-")) for name in request.headers)
        return None if request.method != "PUT" or has_checksum else s3_error(400, "InvalidRequest")

    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = refuse
        store = store_behind(proxy, settings_of("ministack"), tags={"team": "llm"})
        store._bulk._by_boto3 = by_boto3
        store.check_writable()
        write_every_way(store, tmp_path)
        assert {found.key for found in store.list("")} == {"record.json", "manifest.json", "small", "large"}


@pytest.mark.parametrize("by_boto3", [False, True])
def test_a_browser_shows_the_pages_of_a_store_and_nothing_that_a_job_wrote(
    ministack: S3Server, settings_of: Any, tmp_path: Path, by_boto3: bool
) -> None:
    store = S3Store(settings_of("ministack"))
    store._bulk._by_boto3 = by_boto3
    (tmp_path / "job.html").write_bytes(b"<script>")
    store.put_file("runs/job.html", FileSource(tmp_path / "job.html"))
    store.put("reports/index.html", b"<h1>")
    store.put("reports/nightly.junit.xml", b"<testsuites/>")

    found = {
        key: ministack.client().head_object(Bucket=store.bucket, Key=store.prefix + key)["ContentType"]
        for key in ("reports/index.html", "reports/nightly.junit.xml", "runs/job.html")
    }
    assert list(found.values())[:2] == ["text/html; charset=utf-8", "application/xml"]
    assert "html" not in found["runs/job.html"]


@pytest.mark.parametrize("kind", ["ceph", "ministack"])
def test_the_server_has_the_tags(
    request: pytest.FixtureRequest, settings_of: Callable[[str], StoreSettings], tmp_path: Path, kind: str
) -> None:
    server: S3Server = request.getfixturevalue(kind)
    store = S3Store(settings_of(kind).model_copy(update={"tags": {"team": "llm & co", "temporary": ""}}))
    write_every_way(store, tmp_path)
    for key in ("record.json", "manifest.json", "small", "large"):
        answer = server.client().get_object_tagging(Bucket=store.bucket, Key=store.prefix + key)
        found = {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}
        assert found == {"team": "llm & co", "temporary": ""}, key


def assumed(token: str, lasts: timedelta) -> Answer:
    """STS's answer to AssumeRole."""
    until = f"{datetime.now(UTC) + lasts:%Y-%m-%dT%H:%M:%SZ}"
    fields = {"AccessKeyId": "ASIATEST", "SecretAccessKey": "s" * 40, "SessionToken": token, "Expiration": until}
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    body = (
        '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
        f"{inner}</Credentials></AssumeRoleResult></AssumeRoleResponse>"
    )
    return Answer(200, body.encode(), (("Content-Type", "text/xml"),))


@pytest.mark.parametrize(("lasts", "tokens"), [(60, ["t1", "t1"]), (1, ["t1", "t2"])], ids=["for an hour", "a minute"])
def test_a_role_is_assumed_at_the_configured_server_and_again_before_it_expires(
    ministack: S3Server, settings_of: Any, lasts: int, tokens: list[str]
) -> None:
    asked: list[Request] = []

    def answer_sts(request: Request) -> Answer | None:
        if request.method != "POST" or request.path != "/":
            return None
        asked.append(request)
        return assumed(f"t{len(asked)}", timedelta(minutes=lasts))

    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = answer_sts
        store = store_behind(proxy, settings_of("ministack"), role_arn="arn:aws:iam::1:role/harvest")
        assert asked == []  # nothing is asked before it is needed
        store.put("a", b"1")
        time.sleep(0.3)  # obstore asks for credentials ten times a second at most
        store.put("b", b"2")
        written = [request for request in proxy.requests if request.method == "PUT"]
    assert [request.headers["x-amz-security-token"] for request in written] == tokens
    assert len(asked) == len(set(tokens))


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("/bin/false", TransientError, "the credentials could not be fetched .*Log in again, or try later"),
        ("/bin/echo hello", InvalidInput, "Correct the store's settings"),
        ("/no/such/program", InvalidInput, "No such file.*Correct the store's settings"),
    ],
)
def test_a_program_that_cannot_hand_out_credentials_now_is_waited_for_and_a_wrong_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: type[Exception], words: str
) -> None:
    (tmp_path / "config").write_text(f"[profile site]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(kind, match=words):
        S3Store(StoreSettings(url="s3://bucket/x", endpoint_url="http://127.0.0.1:1", profile="site"))


@pytest.mark.parametrize("role", [None, "arn:aws:iam::123456789012:role/other"])
def test_a_web_identity_whose_token_is_not_there_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str | None
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/night")
    store = S3Store(StoreSettings(url="s3://bucket/x", endpoint_url="http://127.0.0.1:1", role_arn=role))

    for use in (store.get, store.stat, store.delete, lambda key: store.put(key, b"{}"), lambda key: [*store.list(key)]):
        with pytest.raises(TransientError, match=rf"credentials could not be fetched .*No such file.*{tmp_path}/token"):
            use("record.json")


def test_credentials_that_cannot_be_renewed_are_named_by_what_sends_the_bytes_too() -> None:
    text = "lacked valid credentials for path External AWS credential provider: SSOTokenLoadError: Token for site"
    assert translate_text(text, "s3://b/k").advice == "Log in again, or try later"


@pytest.mark.parametrize("content", [None, "", "not a certificate"])
def test_authorities_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_text(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(InvalidInput, match=f"{bundle}: no certificates can be read from it"):
        S3Store(StoreSettings(url="s3://bucket/x", endpoint_url="https://127.0.0.1:1"))


def test_buckets_are_addressed_by_path_or_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "http://s3.example.org"
    with proxy_to("http://127.0.0.1:1") as proxy:
        etag = f'"{hashlib.md5(b"").hexdigest()}"'
        proxy.before = lambda _: Answer(200, headers=(("x-amz-request-id", "1"), ("ETag", etag)))
        monkeypatch.setenv("http_proxy", proxy.endpoint_url)  # as no name server knows that host
        for path_style in (True, False):
            settings = StoreSettings(url="s3://nightly/llm", endpoint_url=endpoint, path_style=path_style)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            store = S3Store(settings)
            store.put("a", b"")
            store.delete("a")
        reached = [request.path for request in proxy.requests]
    assert reached == ["http://s3.example.org/nightly/llm/a"] * 2 + ["http://nightly.s3.example.org/llm/a"] * 2


def test_the_signer_is_the_clients_own_and_no_other_client_of_the_process_has_it(ministack: S3Server) -> None:
    table = dict(botocore.auth.AUTH_TYPE_MAPS)
    wrong = base64.b64encode(hashlib.sha256(b"another body").digest()).decode()
    payloads: dict[str, str] = {}
    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = lambda _: Answer(200)
        ours = store_behind(proxy, ministack.store_settings(BUCKET))._client
        theirs = dataclasses.replace(ministack, endpoint_url=proxy.endpoint_url).client()
        for name, client in (("ours", ours), ("theirs", theirs)):
            client.put_object(Bucket=BUCKET, Key="a", Body=b"body", ChecksumSHA256=wrong)
            payloads[name] = proxy.requests[-1].headers["x-amz-content-sha256"]
    assert payloads == {
        "ours": hashlib.sha256(b"another body").hexdigest(),
        "theirs": hashlib.sha256(b"body").hexdigest(),
    }
    assert table == botocore.auth.AUTH_TYPE_MAPS
