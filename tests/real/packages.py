"""Installs what the real-part tests need from Debian's packages: `python tests/real/packages.py`, run by `make test`.

It starts no service: a policy-rc.d forbids that while packages are installed, and the tests start daemons of their own.
On a host that has a Slurm of its own nothing of Slurm is installed unless `NIGHTBRIDGE_TEST_INSTALL=1` asks for it.
Whatever it leaves out it names, with the reason; it never fails, since the tests that lack a part say so themselves.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS: dict[str, tuple[str, ...]] = {
    "Slurm": (
        "slurmctld",
        "slurmd",
        "slurmdbd",
        "slurm-client",
        "slurm-wlm-basic-plugins",
        "slurm-wlm-mysql-plugin",
        "munge",
        "mariadb-server",
    ),
    "Ceph's S3 gateway": ("ceph-mon", "ceph-osd", "ceph-common", "radosgw", "uuid-runtime", "openssl"),
    "the container registry": ("docker-registry", "skopeo", "umoci", "squashfs-tools"),
    "the container image": ("debootstrap",),
    "PostgreSQL": ("postgresql",),
    "several Prefect servers": ("redis-server", "nginx-light"),
    "the clock": ("faketime", "libfaketime"),
    "the browser": ("chromium-headless-shell",),
}
ASKED = os.environ.get("NIGHTBRIDGE_TEST_INSTALL") == "1"
POLICY = Path("/usr/sbin/policy-rc.d")
SAVED_POLICY = Path("/usr/sbin/policy-rc.d.before-nightbridge")


def main() -> int:
    """Install each group that is not there, and say what was left out."""
    for group, packages in GROUPS.items():
        missing = [package for package in packages if not is_installed(package)]
        if not missing:
            continue
        if reason := reason_to_skip(group):
            print(f"{group}: {', '.join(missing)} not installed: {reason}", file=sys.stderr)
        elif not install(missing):
            print(f"{group}: apt-get could not install {', '.join(missing)}", file=sys.stderr)
    return 0


def is_installed(package: str) -> bool:
    """Whether dpkg calls a package installed."""
    if shutil.which("dpkg-query") is None:
        return False
    answer = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout == "installed"


def reason_to_skip(group: str) -> str | None:
    """Why a group is not installed here; None when it may be."""
    if not _is_debian():
        return "this is neither Debian nor Ubuntu"
    if os.geteuid() != 0:
        return "installing needs root"
    if group == "Slurm" and not ASKED and (own := own_slurm()):
        return f"this host has a Slurm of its own ({own}); NIGHTBRIDGE_TEST_INSTALL=1 installs all the same"
    return None


def own_slurm() -> str | None:
    """What shows that this host belongs to a Slurm cluster; None when nothing does."""
    for name in ("slurmctld", "slurmd", "slurmdbd"):
        if name in _running():
            return f"{name} is running"
    for folder in ("/etc/slurm", "/etc/slurm-llnl"):
        if (Path(folder) / "slurm.conf").exists():
            return f"{folder}/slurm.conf"
    sbatch = shutil.which("sbatch")
    if sbatch is not None and not is_installed("slurm-client"):
        return sbatch
    return "SLURM_CONF is set" if os.environ.get("SLURM_CONF") else None


def install(packages: list[str]) -> bool:
    """Install packages without starting what they bring; whether that worked."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"]
    print(f"installing {', '.join(packages)} for the tests; no service is started", file=sys.stderr)
    with services_forbidden():
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            if (
                subprocess.run([*apt, *arguments], env=environment, stdin=subprocess.DEVNULL, check=False).returncode
                != 0
            ):
                return False
    return True


@contextlib.contextmanager
def services_forbidden() -> Iterator[None]:
    """Forbid starting services for a while (invoke-rc.d(8)); a policy that was there before is put back afterwards."""
    # A copy that is already there was left by a run that was killed: it is the host's own.
    if POLICY.exists() and not SAVED_POLICY.exists():
        POLICY.rename(SAVED_POLICY)
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        if SAVED_POLICY.exists():
            SAVED_POLICY.replace(POLICY)
        else:
            POLICY.unlink()


def _is_debian() -> bool:
    release = Path("/etc/os-release")
    if shutil.which("apt-get") is None or not release.exists():
        return False
    fields = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    names = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    return bool({"debian", "ubuntu"} & set(names))


def _running() -> set[str]:
    names = set()
    for process in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.add(process.read_text().strip())
    return names


if __name__ == "__main__":
    sys.exit(main())
