"""A warm process of a launcher environment, forked for each submission: a program of that environment's Python.

NeMo-Run's dependencies take seconds of processor time to import, NeMo-Run itself hundredths. So this process has
imported both and dropped NeMo-Run again: each fork imports it anew, since it reads its environment as it is imported
(where its `.slurm_jobs` lies, for one). The rest of the environment is what the forks will have.

A connection and a pipe for output come through standard input, for each submission. A fork sends its process id, gets
its command line, environment and folder, and becomes the launcher: `__main__`, to the interpreter's own end. What is
secret is thus known to that fork alone. Its parent, a fork without a task, sends its exit code.

Standard library only, and no module of ours: the launcher's Python does not have it.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys

IDLE_SECONDS = 300.0
"""A warm process that nobody needed for so long ends; the next submission starts another."""


def main(package: str) -> None:
    """Serve until standard input ends; returns in a fork, which is to run the launcher, with its command line set."""
    control = socket.socket(fileno=0)
    importlib.import_module(package)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # threads do not survive a fork
    gc.freeze()
    control.settimeout(IDLE_SECONDS)
    with contextlib.suppress(TimeoutError):
        while descriptors := socket.recv_fds(control, 1, 2)[1]:
            if os.fork() == 0:
                control.detach()
                _submit(*descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # those that have ended by now
    os._exit(0)


def _submit(connected: int, output: int) -> None:
    """Fork the process of a submission, in which this returns; tell how it ended."""
    connection = socket.socket(fileno=connected)
    launcher = os.fork()
    if launcher:
        for descriptor in (0, output):
            os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % code)
        os._exit(0)
    os.setsid()
    with connection, connection.makefile("rb") as lines:
        connection.sendall(b"%d\n" % os.getpid())
        line = lines.readline()
    if not line:
        os._exit(1)  # its caller has gone
    request = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, output):
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    if "numpy" in sys.modules:  # Python's own generator is seeded anew in each fork
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
