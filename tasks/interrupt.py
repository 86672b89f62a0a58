"""Interruption of a process whose runs go on in threads: only the main thread is told, and the others have to end too.

Slurm jobs are no part of it: they go on, and the next run of the same night finds them.
"""

import threading

_interrupted = threading.Event()


def interrupt_stages() -> None:
    """From now on no stage of this process begins."""
    _interrupted.set()


def allow_stages() -> None:
    """Let stages begin again: a new night in the same process."""
    _interrupted.clear()


def raise_if_interrupted() -> None:
    """End the calling thread's run.

    Raises:
        KeyboardInterrupt: The process is ending. Prefect takes it for a crash and tries nothing again.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt("the process was interrupted; jobs that were submitted go on")
