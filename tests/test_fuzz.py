"""Mutated input of every kind that others write: no exception that is none of ours, no hang, no memory.

A few of each here; `make soak` tries 20,000 outputs of jobs, 20,000 TOML documents and 2,000 answers of registries
(`NIGHTBRIDGE_FUZZ` times as many).
"""

import http.server
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nightbridge import config
from nightbridge.errors import NightbridgeError
from nightbridge.images.registry import parse_reference, registry_digest
from nightbridge.launch.config_container import read_container
from nightbridge.outputs.checkpoint_metadata import read_metadata
from nightbridge.outputs.checkpoints import checkpoint_state, tracked_iteration
from nightbridge.outputs.event_files import read_event_file
from nightbridge.outputs.experiment import _of_environment, _of_log, _of_repositories
from nightbridge.outputs.logs import LogTail, read_logs
from nightbridge.slurm.attempt_files import read_ended, read_exit_code
from nightbridge.slurm.states import parse_sacct
from tests.builders import make_job
from tests.hostile import CORPUS
from tests.nightbridge.outputs.builders import EventFileBuilder, StepLine

TIMES = int(os.environ.get("NIGHTBRIDGE_FUZZ", "1"))
OUTPUTS, DOCUMENTS, ANSWERS = 200 * TIMES, 200 * TIMES, 20 * TIMES
pytestmark = [pytest.mark.timeout(7200), pytest.mark.thorough]
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "nightbridge/outputs/data"


def quickly(examples: int) -> settings:
    """Examples without the search for a smaller one: what is drawn is one seed."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=phases, derandomize=True)


@contextmanager
def harmless() -> Iterator[None]:
    """Errors of ours are answers; it takes neither seconds nor memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with suppress(NightbridgeError):
        yield
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def mutated(seed: int, original: bytes, pieces: list[bytes]) -> bytes:
    """The original with some places flipped, cut, doubled, moved, or with a piece of another one in them."""
    chance, data = random.Random(seed), bytearray(original)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at, size = chance.randrange(len(data) + 1), chance.choice((1, 1, 2, 8, 64, 4096))
        change = chance.randrange(6)
        if change == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = data[at : at + size] * chance.choice((1, 2, 50))
        elif change == 3:
            data[at:at] = chance.choice(pieces)
        elif change == 4:
            data[at : at + size] = chance.randbytes(min(size, 64))
        else:
            del data[at:]
    return bytes(data[: 1 << 20])


PIECES = [
    b"[",
    b"{",
    b"9" * 4301,
    b"inf",
    b"nan",
    b"-1",
    "²".encode(),
    b"\0",
    b" " * 5000,
    b"\xff\xfe",
    b"&a ",
    b"*a ",
    b"<<: ",
]
PIECES += [
    b"(",
    b"\x85",
    b"\x86\x94",
    b"h\x00",
    b"2",
    b"\x94",
    b"a: ",
    b"|",
    b"\n",
    b"\r",
    b"\x1b[",
    b"iteration 1/ 10 |",
    b"0x",
    b"1e999",
]


def good_files(folder: Path) -> dict[str, bytes]:
    events = EventFileBuilder(folder / "events.out.tfevents.1760000000.node1.1.0", 1760000000.0)
    for step in range(1, 30):
        events.scalar("lm loss", step, 1.0 / step).scalar("iteration-time", step, 0.5)
    return {
        "log": "".join(f"{StepLine(number).perf}\n{StepLine(number).step}\n" for number in range(1, 20)).encode(),
        "event_file": events.write().read_bytes(),
        "metadata": (DATA / "torch_2_13_with_plans.metadata").read_bytes(),
        "run_config": b"checkpoint:\n  ckpt_format: torch_dist\nmodel:\n  _target_: megatron.X\n  list: [1, 2.5, null]\n",
        "metadata_json": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}',
        "config_container": b"model:\n  seq_length: 4096\n  x: {a: [1, 2]}\ntrain:\n  global_batch_size: 8\n  lr: 1.0e-4\n",
        "tracker": b"10",
        "number": b"0\n",
        "repo_status": b'[{"name": "Megatron-LM", "sha": "0123456789abcdef"}]',
        "environment": b"CUDA_VERSION=13.0\nNCCL_VERSION=2.28\n",
        "ended": make_job("fuzz", folder, cluster="local").model_dump_json().encode(),
        "sacct": b"4711|COMPLETED|2026-11-20T22:00:00|2026-11-20T22:00:10|2026-11-20T22:10:00|node1|None|0:0|name\n",
    }


def read_as(kind: str, path: Path) -> None:
    """Read a file as what it stands for."""
    folder = path.parent
    checkpoint = folder / "iter_0000010"
    readers: dict[str, Callable[[], object]] = {
        "log": lambda: (read_logs([path]), LogTail(path).new_lines(), list(_of_log(path))),
        "event_file": lambda: read_event_file(path),
        "metadata": lambda: read_metadata(path),
        "run_config": lambda: (path.replace(checkpoint / "run_config.yaml"), checkpoint_state(checkpoint)),
        "metadata_json": lambda: (path.replace(checkpoint / "metadata.json"), checkpoint_state(checkpoint)),
        "config_container": lambda: read_container(path),
        "tracker": lambda: (path.replace(folder / "latest_checkpointed_iteration.txt"), tracked_iteration(folder)),
        "number": lambda: (path.replace(folder / "exit_code"), read_exit_code(folder)),
        "repo_status": lambda: list(_of_repositories(path, frozenset())),
        "environment": lambda: list(_of_environment(path)),
        "ended": lambda: (path.replace(folder / "ended.json"), read_ended(folder)),
        "sacct": lambda: parse_sacct(path.read_text(errors="replace")),
    }
    readers[kind]()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    checkpoint = folder / "iter_0000010"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes((DATA / "torch_2_13_two_ranks.metadata").read_bytes())
    (checkpoint / "train_state.pt").write_bytes(b"state")
    return folder


@quickly(OUTPUTS)
@given(seed=st.integers(0, 2**63))
def test_any_output_of_a_job(seed: int, place: Path) -> None:
    good = good_files(place)
    kind = random.Random(seed).choice(sorted(good))
    originals = [good[kind], *(path.read_bytes()[: 1 << 18] for path in sorted((CORPUS / kind).glob("*")))]
    path = place / "file"
    path.write_bytes(mutated(seed, random.Random(seed + 1).choice([good[kind], *originals]), PIECES))

    with harmless():
        read_as(kind, path)


SAMPLES = [path.read_bytes() for path in sorted((ROOT / "conf").rglob("*.toml"))]


@quickly(DOCUMENTS)
@given(seed=st.integers(0, 2**63))
def test_any_toml_document(seed: int, place: Path) -> None:
    path = place / "any.toml"
    lines = [line for sample in SAMPLES for line in sample.splitlines(keepends=True)]
    path.write_bytes(mutated(seed, random.Random(seed).choice(SAMPLES), [*PIECES, *lines]))

    with harmless():
        config.load(path)


HEADERS = [
    "WWW-Authenticate",
    "Docker-Content-Digest",
    "Retry-After",
    "Location",
    "Content-Length",
    "Transfer-Encoding",
    "Content-Type",
]
VALUES = [
    "",
    "Bearer",
    'Bearer realm="http://[::1"',
    'Bearer realm="http://{host}/token",service="x",scope="y"',
    "Basic",
    "chunked",
    "-1",
    "1",
    "²",
    "9" * 5000,
    "sha256:" + "0" * 64,
    "sha256:x",
    "file:///etc/passwd",
    "http://{host}/other",
    "gzip",
    "\xff",
    "0",
]
BODIES = [
    b"",
    b"{}",
    b'{"token": "x"}',
    b'{"token": "a\\r\\nX: y"}',
    b'{"token": {"a": 1}}',
    b'{"access_token": "\\ud800"}',
    b"[" * 100_000,
    b"9" * 5000,
    b"null",
    b"x" * (1 << 20),
    bytes(range(256)),
]


class _Hostile(http.server.BaseHTTPRequestHandler):
    chance = random.Random(0)

    def do_GET(self) -> None:
        chance = self.chance
        status = chance.choice((200, 200, 401, 401, 401, 301, 403, 404, 429, 500, 503, 999))
        with suppress(OSError, ValueError):
            self.send_response(status, chance.choice(("OK", "x" * 300)))
            for _ in range(chance.randrange(4)):
                value = chance.choice(VALUES).replace("{host}", self.headers.get("Host", ""))
                self.send_header(chance.choice(HEADERS), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(mutated(chance.randrange(1 << 60), chance.choice(BODIES), PIECES))
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_any_answer_of_a_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "DOCKER_CONFIG", "ENROOT_CONFIG_PATH", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "1")
    monkeypatch.setattr("nightbridge.images.registry._TIMEOUT_SECONDS", 2)
    monkeypatch.setattr("nightbridge.images.registry.time.sleep", lambda _: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    reference = parse_reference(f"127.0.0.1:{server.server_port}/team/image:1")
    try:
        for number in range(ANSWERS):
            _Hostile.chance = random.Random(number)
            began = time.monotonic()
            with harmless():
                registry_digest(reference)
            assert time.monotonic() - began < 10, number
    finally:
        server.shutdown()
