"""Prefect's server for one process: run as a script by `flows.server`, it ends as soon as that process is gone.

It imports nothing of ours, which would make its start slower, and Prefect itself only after it listens for its end.
"""

import gc
import os
import socket
import sys
import threading


def end_with_parent() -> None:
    """End this process at the end of its standard input: the other side of that pipe is held by the parent alone.

    A parent that was killed sends nothing, but the kernel closes its files.
    """
    os.read(0, 1)
    os._exit(0)


def main(listening: int) -> None:
    """Serve Prefect's API on a bound socket that the parent has handed over as this file descriptor."""
    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    gc.disable()  # all that is imported stays: to walk through it again and again is a seventh of the start
    import uvicorn

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on")
    config.load()
    gc.freeze()
    gc.enable()
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
