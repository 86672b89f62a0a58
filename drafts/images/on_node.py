"""enroot on a compute node, for sites whose login nodes have none.

The tag is resolved here, by the registry's own API; the import is one job, which leaves its file on the shared file
system, where it is checked like any other. How a program gets onto a node is the caller's: this package knows no Slurm.
"""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.images.enroot import DEFAULTS, IMPORT_TIMEOUT_SECONDS, explained
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import registry_digest
from nightbridge.images.space import IMAGE_FACTOR, UNPACKED_FACTOR, Need, check_space, known_size, too_little_space
from nightbridge.images.work import work_name
from nightbridge.models import ImageImport
from nightbridge.processes import Finished

log = logging.getLogger(__name__)

_NO_ENROOT, _NO_SPACE = 127, 74
_JOB_NAME_LENGTH = 40
_SPACE = re.compile(r"^nightbridge: (?P<where>.+): (?P<needed>\d+) KiB needed, (?P<free>\d+) KiB free$", re.MULTILINE)
# With our own messages: enroot's variables, and those by which curl finds its proxy.
_PASSED_ON = re.compile(r"ENROOT_\w+|(https?|no|all)_proxy|SSL_CERT_\w+|SOURCE_DATE_EPOCH", re.IGNORECASE)

# Arguments: output; addresses for enroot 4 and 3; temporary folder; name of ours in it; KiB that it needs; "login" when
# lines of netrc(5) come by stdin. Those lines are kept in an open file without a name: they end with this shell.
_SCRIPT = r"""
set -u
node=${SLURMD_NODENAME:-$(uname -n)}
command -v enroot > /dev/null || { echo "nightbridge: no enroot on $node" >&2; exit 127; }
version=$(enroot version) || exit 1
base=${4:-${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}}
mkdir -p "$base" || exit 1
rm -rf "$base/$5".*
free=$(df -Pk "$base" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt "$6" ]; then
    echo "nightbridge: $base on $node: $6 KiB needed, $free KiB free" >&2
    exit 74
fi
work=$(mktemp -d "$base/$5.XXXXXX") || exit 1
trap 'chmod -R u+rwX "$work"; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT HUP
mkdir "$work/import" "$work/config"
if [ "$7" = login ]; then
    lines=$(mktemp -p /dev/shm 2> /dev/null || mktemp -p "$work") || exit 1
    cat > "$lines"
    exec 3< "$lines"
    rm -f "$lines"
    ln -s "/proc/$$/fd/3" "$work/config/.credentials"
    export ENROOT_CONFIG_PATH="$work/config"
fi
export ENROOT_TEMP_PATH="$work/import"
case $version in
[0-3].*) address=$3 ;;
*) address=$2 ;;
esac
echo "enroot $version on $node"
enroot import --output "$1" "$address"
"""


class RunOnNode(Protocol):
    """Runs a program once on a compute node and waits for its end; Slurm's own failures are raised."""

    def __call__(
        self,
        name: str,
        argv: list[str],
        *,
        environment: dict[str, str],
        timeout: float,
        given: bytes,
        on_line: Callable[[str], None],
    ) -> Finished:
        """Run `argv` as the job `name`."""


class EnrootOnNode:
    """Imports by a job on a compute node.

    Args:
        run_on_node: How a program gets there.
        settings: Its folders, as the nodes know them.
        credentials: Logins as lines of netrc(5).

    """

    tool = "enroot on a compute node"
    work_folders: tuple[Path, ...] = ()

    def __init__(self, run_on_node: RunOnNode, settings: ImageImport, credentials: str = "") -> None:
        self._run_on_node = run_on_node
        self._settings = settings
        self._credentials = SecretStr(credentials)

    def digest(self, reference: ImageReference) -> str:
        """The digest that a reference means now; see `registry_digest`. No job is needed for that."""
        return registry_digest(reference, self._credentials.get_secret_value())

    def import_image(self, reference: ImageReference, output: Path) -> str:
        """Import an image into a file that does not exist yet; return what made it, and on which node.

        What a failed import left is removed.

        Raises:
            InvalidInput: There is no such image.
            LaunchRefused: Slurm refused the job for good.
            PermanentError: The registry refuses us, a disk is or would be full, or the node has no enroot.
            TransientError: The registry cannot be reached or is busy, or Slurm did not let the import end.

        """
        credentials = self._credentials.get_secret_value()
        size = known_size(reference, credentials)
        check_space((Need(folder=output.parent, size=int(IMAGE_FACTOR * size)),), reference)
        # Without the part that differs from try to try; the beginning tells folders of images and digests apart.
        name = work_name(output).removesuffix(".sqsh.tmp").rpartition(".")[0]
        argv = [
            "/bin/sh", "-c", _SCRIPT, "sh",
            str(output),
            reference.uri(enroot_major=4),
            reference.uri(enroot_major=3),
            str(self._settings.temp or ""),
            name,
            str(int(UNPACKED_FACTOR * size) // 1024),
            "login" if credentials else "",
        ]  # fmt: skip
        try:
            finished = self._run_on_node(
                name[:_JOB_NAME_LENGTH],
                argv,
                environment=self._environment(),
                timeout=IMPORT_TIMEOUT_SECONDS,
                given=credentials.encode() + b"\n" if credentials else b"",
                on_line=lambda line: log.info("enroot: %s", line) if line.startswith("[INFO]") else None,
            )
            if finished.code:
                raise _explained(finished, reference)
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        if not output.exists():
            raise TransientError(
                "the image that a compute node made is not to be seen here",
                thing=str(output),
                advice="The images' folder must be on a file system that the nodes share",
            )
        said = finished.stdout.decode(errors="replace").splitlines()
        return said[0] if said else self.tool

    def _environment(self) -> dict[str, str]:
        passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        cache = {"ENROOT_CACHE_PATH": str(self._settings.cache)} if self._settings.cache else {}
        return {**DEFAULTS, **passed_on, **cache}


def _explained(finished: Finished, reference: ImageReference) -> NightbridgeError:
    if finished.code == _NO_SPACE and (said := _SPACE.search(finished.stderr)):
        return too_little_space(said["where"], int(said["needed"]) * 1024, int(said["free"]) * 1024, reference)
    if finished.code == _NO_ENROOT:
        return PermanentError(
            f"enroot cannot be run there ({finished.tail})",
            thing=str(reference),
            advice="Name nodes that have it with srun_args (--partition, --constraint), or import on this machine",
        )
    return explained(finished, reference)
