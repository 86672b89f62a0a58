"""Large files into a bucket, on real servers: in bounded memory, each byte once, also after an interruption."""

import hashlib
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.auth
import pytest

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.harvest.upload import Unit, upload
from nightbridge.models import StoreSettings
from nightbridge.store import s3_client, s3_multipart
from nightbridge.store.checksum import MAX_PARTS, PART_SIZE, FileSource, part_size
from nightbridge.store.s3 import S3Store
from tests.real.s3_proxy import LOST, Answer, Proxy, Request, proxy_to, s3_error
from tests.real.s3_servers import S3Server

pytestmark = pytest.mark.s3

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["ceph", "ministack"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def settings(
    server: S3Server, settings_of: Callable[[str], StoreSettings], request: pytest.FixtureRequest
) -> StoreSettings:
    return settings_of(request.node.callspec.params["server"])


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(random.Random(1).randbytes(5 * PART_SIZE + 123))
    return path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try per request: what fails for good is not waited for."""
    monkeypatch.setitem(s3_client._CONFIG, "retries", {"mode": "standard", "total_max_attempts": 1})


def behind(proxy: Proxy, settings: StoreSettings) -> S3Store:
    return S3Store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))


def part_of(request: Request) -> int:
    """The number of the part that a request sends, 0 when it sends none."""
    found = re.search(r"partNumber=(\d+)", request.path)
    return int(found[1]) if found else 0


def parts_sent(proxy: Proxy) -> list[int]:
    """Numbers of the parts that arrived."""
    return sorted(filter(None, map(part_of, proxy.requests)))


def refuse_part(number: int, answer: Answer) -> Callable[[Request], Answer | None]:
    return lambda request: answer if part_of(request) == number else None


def unfinished(server: S3Server, store: S3Store) -> list[Any]:
    found = server.client().list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix)
    return list(found.get("Uploads", []))


def test_an_interrupted_upload_goes_on_and_sends_no_part_again(
    server: S3Server, settings: StoreSettings, shard: Path, impatient: None
) -> None:
    store = S3Store(settings)
    with proxy_to(server.endpoint_url) as proxy:
        proxy.before = refuse_part(4, s3_error(400, "ExpiredToken"))
        with pytest.raises(TransientError, match="credentials have expired"):
            behind(proxy, settings).put_file("c/shard", FileSource(shard))
        there = {
            part["PartNumber"]
            for each in unfinished(server, store)
            for part in server.client().list_parts(Bucket=store.bucket, Key=each["Key"], UploadId=each["UploadId"])[
                "Parts"
            ]
        }
        proxy.before = lambda _: None
        proxy.requests.clear()

        behind(proxy, settings).put_file("c/shard", FileSource(shard))

        assert {1, 2, 3} <= there
        assert set(parts_sent(proxy)) == {1, 2, 3, 4, 5, 6} - there
    assert store.get("c/shard") == shard.read_bytes()
    assert unfinished(server, store) == []


def test_an_interrupted_upload_that_the_server_does_not_complete_is_sent_anew(
    seaweedfs: S3Server, settings_of: Any, shard: Path, impatient: None
) -> None:
    """SeaweedFS lists no checksums, and refuses an upload of which some parts came with one and others without."""
    store = S3Store(settings := settings_of("seaweedfs"))
    with proxy_to(seaweedfs.endpoint_url) as proxy:
        proxy.before = refuse_part(4, s3_error(400, "ExpiredToken"))
        with pytest.raises(TransientError, match="credentials have expired"):
            behind(proxy, settings).put_file("c/shard", FileSource(shard))

    store.put_file("c/shard", FileSource(shard))

    assert store.get("c/shard") == shard.read_bytes()
    assert unfinished(seaweedfs, store) == []


def test_where_etags_are_no_md5s_the_kept_checksums_tell_which_parts_are_there(
    ministack: S3Server, settings_of: Any, shard: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a key of KMS an ETag is not the MD5 of what was sent: here nothing that was read has the MD5 it had before.
    settings = settings_of("ministack").model_copy(update={"encryption": "aws:kms", "kms_key_id": "a-key"})
    monkeypatch.setattr(s3_multipart, "md5_hex", lambda data: "0" * 32)
    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = refuse_part(4, s3_error(400, "ExpiredToken"))
        with pytest.raises(TransientError, match="credentials have expired"):
            behind(proxy, settings).put_file("c/shard", FileSource(shard))
        arrived = set(parts_sent(proxy)) - {4}
        proxy.before = lambda _: None
        proxy.requests.clear()

        sent = behind(proxy, settings).put_file("c/shard", FileSource(shard))

        assert {1, 2, 3} <= arrived
        assert set(parts_sent(proxy)) == {1, 2, 3, 4, 5, 6} - arrived
    store = S3Store(settings)
    assert store.get("c/shard") == shard.read_bytes()
    found = store.stat("c/shard")
    assert found is not None
    assert (found.sha256, found.part_size) == (sent.sha256, PART_SIZE)


def test_every_byte_is_hashed_once_and_the_signature_carries_that_checksum(
    server: S3Server, settings: StoreSettings, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    botocores = botocore.auth.S3SigV4Auth.payload

    def count(auth: Any, request: Any) -> Any:
        hashed.append(len(request.body or b""))
        return botocores(auth, request)

    monkeypatch.setattr(botocore.auth.S3SigV4Auth, "payload", count)
    with proxy_to(server.endpoint_url) as proxy:
        behind(proxy, settings).put_file("c/shard", FileSource(shard))
        behind(proxy, settings).put_file("c/small", FileSource(Path(__file__)))
        data = shard.read_bytes()
        for request in proxy.requests:
            if number := part_of(request):
                part = data[(number - 1) * PART_SIZE : number * PART_SIZE]
                assert request.headers["x-amz-content-sha256"] == hashlib.sha256(part).hexdigest()
    assert sum(hashed) < 10_000  # what is listed when an upload is completed, and no byte of a file


def test_parts_of_a_file_that_has_changed_since_are_sent_again(
    server: S3Server, settings: StoreSettings, shard: Path, impatient: None
) -> None:
    with proxy_to(server.endpoint_url) as proxy:
        proxy.before = refuse_part(4, s3_error(500, "InternalError"))
        with pytest.raises(TransientError):
            behind(proxy, settings).put_file("shard", FileSource(shard))
    data = bytearray(shard.read_bytes())
    data[PART_SIZE + 5] ^= 1
    shard.write_bytes(data)

    S3Store(settings).put_file("shard", FileSource(shard))

    assert S3Store(settings).get("shard") == bytes(data)


def test_an_upload_that_another_process_ended_begins_again(
    server: S3Server, settings: StoreSettings, shard: Path
) -> None:
    store = S3Store(settings)
    ended = threading.Event()

    def end_once(request: Request) -> None:
        if part_of(request) == 2 and not ended.is_set():
            ended.set()
            store.remove_leftovers("")

    with proxy_to(server.endpoint_url) as proxy:
        proxy.before = end_once
        behind(proxy, settings).put_file("shard", FileSource(shard))
    assert ended.is_set()
    assert store.get("shard") == shard.read_bytes()


def test_a_completion_whose_answer_was_lost_counts(ceph: S3Server, settings_of: Any, shard: Path) -> None:
    settings = settings_of("ceph")
    lost = [LOST]

    def lose_completion(request: Request) -> Answer | None:
        return lost.pop() if lost and request.method == "POST" and "uploadId=" in request.path else None

    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.after = lose_completion
        behind(proxy, settings).put_file("shard", FileSource(shard))
        assert not lost
        assert parts_sent(proxy) == [1, 2, 3, 4, 5, 6]
    assert S3Store(settings).get("shard") == shard.read_bytes()


def test_two_processes_sending_one_file_end_with_that_file(
    server: S3Server, settings: StoreSettings, shard: Path
) -> None:
    with ThreadPoolExecutor(3) as pool:
        sent = list(pool.map(lambda _: S3Store(settings).put_file("shard", FileSource(shard)), range(3)))
    assert len(set(sent)) == 1
    assert S3Store(settings).get("shard") == shard.read_bytes()


def test_what_is_there_is_not_sent_and_abandoned_uploads_go(
    server: S3Server, settings: StoreSettings, shard: Path, tmp_path: Path
) -> None:
    store = S3Store(settings)
    (tmp_path / "small").write_bytes(b"small")
    units = [Unit.of(shard, "checkpoints/shard", "checkpoint"), Unit.of(tmp_path / "small", "small", "other")]
    (tmp_path / "scratch").mkdir()
    first = upload(store, "runs/a1", units, (), tmp_path / "scratch")
    for key in ("runs/a1/gone", "runs/a1/checkpoints/shard", "runs/a10/other"):
        server.client().create_multipart_upload(Bucket=store.bucket, Key=store.prefix + key)

    with proxy_to(server.endpoint_url) as proxy:
        again = upload(behind(proxy, settings), "runs/a1", units, (), tmp_path / "scratch")
        assert proxy.count("PUT") == 0

    assert again == first
    assert [each["Key"].removeprefix(store.prefix) for each in unfinished(server, store)] == ["runs/a10/other"]


def test_a_part_that_is_damaged_on_the_way_is_refused_by_the_server(
    ceph: S3Server, settings_of: Any, shard: Path, impatient: None
) -> None:
    settings = settings_of("ceph")
    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.damage = lambda request, body: b"?" + body[1:] if part_of(request) == 3 else body
        with pytest.raises(TransientError, match="data was corrupted in transit"):
            behind(proxy, settings).put_file("shard", FileSource(shard))
    assert S3Store(settings).stat("shard") is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (s3_error(403, "AccessDenied"), PermanentError),
        (s3_error(403, "QuotaExceeded"), PermanentError),
        (s3_error(503, "SlowDown"), TransientError),
        (LOST, TransientError),
    ],
)
def test_what_the_server_answers_in_the_middle_is_told(
    ceph: S3Server, settings_of: Any, shard: Path, impatient: None, answer: Answer, kind: type[NightbridgeError]
) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.before = refuse_part(2, answer)
        with pytest.raises(kind):
            behind(proxy, settings_of("ceph")).put_file("shard", FileSource(shard))


def test_a_server_that_stalls_is_transient(
    ceph: S3Server, settings_of: Any, shard: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(s3_client._CONFIG, "read_timeout", 1)
    over = threading.Event()

    def stall(request: Request) -> Answer | None:
        return LOST if part_of(request) == 2 and not over.wait(20) else None

    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.before = stall
        with pytest.raises(TransientError, match="unreachable"):
            behind(proxy, settings_of("ceph")).put_file("shard", FileSource(shard))
        over.set()


def test_users_who_may_not_list_uploads_can_send(ceph: S3Server, settings_of: Any, shard: Path) -> None:
    settings = settings_of("ceph")
    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.before = lambda request: (
            s3_error(403, "AccessDenied") if request.method == "GET" and "uploads" in request.path else None
        )
        behind(proxy, settings).put_file("shard", FileSource(shard))
    assert S3Store(settings).get("shard") == shard.read_bytes()


REACHES = """
import sys
from pathlib import Path

reached = set()
sys.addaudithook(lambda event, args: reached.add(args[1][:2]) if event == "socket.connect" else None)
from nightbridge.errors import NightbridgeError
from nightbridge.models import StoreSettings
from nightbridge.store.s3 import S3Store
from nightbridge.store.checksum import FileSource

store = S3Store(StoreSettings.model_validate_json(sys.argv[1]))
for call in (
    lambda: store.put_file("big", FileSource(Path(sys.argv[2]))),
    lambda: store.put_if_absent("a", b"a"),
    lambda: list(store.read("big", 0, 1 << 20)),
    lambda: store.stat("big"),
    lambda: list(store.list("")),
    lambda: store.remove_leftovers(""),
):
    try:
        call()
    except NightbridgeError as error:
        print(error, file=sys.stderr)
print(*sorted(f"{host}:{port}" for host, port in reached))
"""


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Answer(301, s3_error(301, "PermanentRedirect").body, (("x-amz-bucket-region", "eu-west-1"),)),
    ],
    ids=["usual", "other region"],
)
def test_no_connection_is_made_to_another_host(
    ceph: S3Server, settings_of: Any, shard: Path, answer: Answer | None
) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.before = lambda _: answer
        settings = settings_of("ceph").model_copy(update={"endpoint_url": proxy.endpoint_url})
        command = [sys.executable, "-c", REACHES, settings.model_dump_json(), str(shard)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [proxy.endpoint_url.removeprefix("http://")]
        assert proxy.requests


@pytest.mark.parametrize("size", [PART_SIZE + 1, 50 << 30, MAX_PARTS * PART_SIZE, MAX_PARTS * PART_SIZE + 1, 5 << 40])
def test_every_size_fits_into_the_parts_that_s3_allows(size: int) -> None:
    assert -(-size // part_size(size)) <= MAX_PARTS
    assert PART_SIZE <= part_size(size) < size / MAX_PARTS + PART_SIZE
    assert part_size(size) % MIB == 0
