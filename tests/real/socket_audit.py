"""A Python whose processes write down whom they talk to: a virtual environment over this one, with an audit hook.

Isolated processes (`python -I`) load it too, since it stands in the environment's own folder and not on PYTHONPATH.
"""

import json
import os
import sys
import sysconfig
import venv
from pathlib import Path

_HOOK = """
import json, os, sys

CALLS = os.path.join(sys.prefix, "calls.jsonl")
PLACE_OF_ADDRESS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}

def hook(event, arguments):
    place = PLACE_OF_ADDRESS.get(event)
    if place is None:
        return
    address = arguments[place]
    host = address[0] if isinstance(address, tuple) else address
    host = host.decode() if isinstance(host, bytes) else host
    descriptor = os.open(CALLS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps([event, str(host), " ".join(sys.orig_argv)[:300]]).encode() + b"\\n")
    os.close(descriptor)

sys.addaudithook(hook)
"""


def make_audited_python(folder: Path) -> Path:
    """Make the environment; return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "sitecustomize.py").write_text(_HOOK)
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def called_hosts(folder: Path) -> dict[str, set[str]]:
    """The hosts that processes of the environment connected to, sent to or looked up; each with their command lines."""
    hosts: dict[str, set[str]] = {}
    for line in (folder / "calls.jsonl").read_text().splitlines():
        _, host, command = json.loads(line)
        if not host.startswith(("/", os.sep)):  # a socket in the file system
            hosts.setdefault(host, set()).add(command)
    return hosts
