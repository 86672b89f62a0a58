"""Which commits a run was made of."""

import json
import os
import subprocess


def write_provenance(path, root):
    """Write the JSON list that names the repositories of this run with their commits, or why that is not known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([_status("Megatron-Bridge", root)], indent=2) + "\n", encoding="utf-8")


def _status(name, root):
    # A tree without .git of its own may lie inside another repository, whose commit would be wrong.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    command = ["git", "-C", str(root), "log", "-1", "--format=%H%n%cI%n%s"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {"name": name, "error": "not a git repository"}
    sha, date, title = done.stdout.splitlines()[:3]
    return {"name": name, "sha": sha, "date": date, "title": title, "url": f"file://{root}"}
