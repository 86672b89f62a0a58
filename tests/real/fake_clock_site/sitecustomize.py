"""What Python processes with a fake clock need besides libfaketime 0.9.10; the first `sitecustomize` on their PYTHONPATH.

`time.sleep` fails there with EINVAL when the monotonic clock is left alone. What does not get this file must not get the
clock either: a night's launcher and jobs, which have an environment of their own, and on a cluster a clock of their own.
"""

import os
import select
import sys
import time
from typing import SupportsIndex


def sleep(seconds: float | SupportsIndex) -> None:
    """Sleep through another system call than `time.sleep`."""
    if (length := float(seconds)) < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], length)


if "LD_PRELOAD" in os.environ:
    time.sleep = sleep
    if "prefect.engine" in sys.orig_argv:
        del os.environ["LD_PRELOAD"]
