"""The end of a process in time, whatever of its threads holds it up.

Python ends only when all threads of its pools have ended, and what they do may take hours: an upload, a question to a
controller that is away. Everything of ours can be killed at any moment, so after a while it is.
"""

import os
import signal
import threading

SECONDS_TO_END = 9.0
"""How long a process may take to end once it is told to."""


def end_after_signals() -> None:
    """Make sure that this process ends soon after the first SIGINT or SIGTERM that it handles.

    Only for a process that is all ours. Whoever else sets handlers meanwhile, as Prefect does for a flow run, changes
    nothing: Python tells this thread of a signal before it calls any. To be called in the main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_signal, args=(reading,), name="end-after-signals", daemon=True).start()


def end_within(seconds: float, code: int) -> None:
    """End this process with an exit code after so many seconds, if it has not ended by then."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def _end_after_signal(reading: int) -> None:
    while (number := os.read(reading, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        pass
    end_within(SECONDS_TO_END, 128 + number)
