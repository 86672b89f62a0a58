"""A process that records that it runs a flow run, as a night's process does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def flow_process(workspace: Path, flow_run: str, interval: float = 0.05) -> Iterator["subprocess.Popen[str]"]:
    """Run one; it ends when its input does."""
    program = f"""
from pathlib import Path
from nightbridge.nights.liveness import alive
with alive(Path({str(workspace)!r}), {flow_run!r}, interval={interval}):
    print("alive", flush=True)
    input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "alive\n"
        yield process
    finally:
        process.kill()
        process.wait()
