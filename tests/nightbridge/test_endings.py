"""A process ends in time, whatever its threads wait for."""

import signal
import subprocess
import sys
import time

import pytest

HELD = """
import signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from nightbridge import processes as endings
endings.SECONDS_TO_END = 0.5
endings.end_after_signals()
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Prefect does for a flow run
pool = ThreadPoolExecutor(1)
pool.submit(time.sleep, 600)
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("told", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_it_ends_with_the_signals_code_despite_a_running_thread(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    begun = time.monotonic()
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)

    assert (process.returncode, told) == (128 + number, "told\n")
    assert time.monotonic() - begun >= 0.5
