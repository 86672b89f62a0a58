"""What is in a .sqsh file, as unsquashfs sees it; and what enroot put into the one that it made of the demo image."""

import json
import subprocess
from pathlib import Path
from typing import Any

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_enroot_import.json").read_text())
"""What enroot 4.1.2 made of the registry's demo image: everything but the text of /etc/rc and /etc/rc.local."""

TEXT_OF_THEIR_OWN = ("/etc/rc", "/etc/rc.local")


def listing(path: Path) -> list[str]:
    """Mode, owner, size and path of everything in an image; no size of folders and of texts that may differ."""
    done = subprocess.run(["unsquashfs", "-lln", str(path)], check=True, capture_output=True, text=True)
    lines = []
    for line in done.stdout.splitlines():
        if "squashfs-root" in line:
            mode, owner, size, _date, _time, name = line.split(maxsplit=5)
            name = name.removeprefix("squashfs-root")
            lines.append(f"{mode} {owner} {'-' if mode[0] == 'd' or name in TEXT_OF_THEIR_OWN else size} {name}")
    return lines


def content(path: Path, name: str) -> str:
    """The text of a file in an image."""
    done = subprocess.run(["unsquashfs", "-cat", str(path), name], check=True, capture_output=True, text=True)
    return done.stdout
