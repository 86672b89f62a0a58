"""The batch script as it is submitted: the launcher's own, behind a guard that leaves evidence without Slurm.

The guard checks that the node sees the attempt's folder, claims the folder for this job, runs the script as it was,
and writes its exit code to a file. It is POSIX shell and needs nothing on the node but sh, ln, mv, cat, rm and sleep.

How: the copy starts itself again with the same interpreter, `$0`, arguments, folder and environment; the second
process skips the guard and is the script. So a script may `exit`, `set -evx`, `exec` another program or be killed, and
its exit code is still written. Signals that Slurm sends to the batch shell alone (`--signal=B:USR1@60`) are handed on.
"""

import re
import shlex
from pathlib import Path

from nightbridge.errors import LaunchRefused

ATTEMPT_FILE = "attempt.json"
"""File that every attempt's folder has before anything is submitted from it."""
CLAIM = "claim"
"""File of the attempt that names the start which may run: the job's id, how often Slurm had restarted it, the guard."""
EXIT_CODE = "exit_code"
"""File of the attempt that holds the script's exit code, 0-255; made in one piece at the script's end."""
PID = ".pid"
"""File, followed by the job's id, that stays of a script that is running, or that Slurm ended by a SIGTERM."""

NOT_VISIBLE = 78
"""The guard's exit code when the node does not see the attempt's folder (EX_CONFIG of sysexits.h)."""
ALREADY_CLAIMED = 79
"""The guard's exit code when another job or start has claimed the attempt. No exit-code file is written for either."""
NOT_WRITABLE = 77
"""The guard's exit code when the node sees the attempt's folder and cannot write there (EX_NOPERM)."""

LATE_SIGNAL = 5
"""Seconds for which a job of several nodes whose script failed stays: Slurm sends SIGTERM to each node by itself."""

GUARD_CODES: dict[int, str] = {
    NOT_VISIBLE: "workspace not visible",
    ALREADY_CLAIMED: "another job has claimed this attempt",
    NOT_WRITABLE: "workspace not writable",
}

_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_OWN = re.compile(r"\s(?:--(?:no-)?requeue|--wait|-W)(?=\s|$)")
# What sbatch reads as a variable of its own stays untouched; this one is gone before the script's first line.
_INNER = "NIGHTBRIDGE_SCRIPT"

_GUARD = """\
# --- guard of nightbridge: checks and claims the attempt's folder, and leaves the exit code there ---
if [ "${%(inner)s:-}" != "${SLURM_JOB_ID:-none}" ]; then
    set +e +u +x +v
    nb_attempt=%(attempt)s
    nb_node=${SLURMD_NODENAME:-$(uname -n)}
    # Opening a FIFO for reading alone would block; what is read is the file whose kind was checked.
    nb_read() { [ -e "$1" ] && { [ -f /dev/fd/0 ] && cat; } <> "$1"; }
    # Since 23.02 slurmstepd makes the folders of a job's output file: only the record proves the workspace.
    if [ ! -e "$nb_attempt/%(record)s" ]; then
        echo "workspace not visible on $nb_node: $nb_attempt" >&2
        exit %(not_visible)d
    fi
    nb_mine="$nb_attempt/.%(claim)s.$SLURM_JOB_ID.$nb_node.$$"
    nb_start="$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $nb_node.$$"
    if ! printf '%%s\\n' "$nb_start" > "$nb_mine"; then
        rm -f "$nb_mine"
        echo "workspace not writable on $nb_node: $nb_attempt" >&2
        exit %(not_writable)d
    fi
    # A hard link is made by one start only, on NFS as well; what counts is what it holds, not the exit code of ln.
    ln "$nb_mine" "$nb_attempt/%(claim)s" 2> /dev/null
    if [ ! -e "$nb_attempt/%(claim)s" ]; then
        (set -C; printf '%%s\\n' "$nb_start" > "$nb_attempt/%(claim)s") 2> /dev/null
    fi
    nb_holder=$(nb_read "$nb_attempt/%(claim)s")
    # A job that was requeued takes over from its earlier start. One that slurmctld started a second time does not.
    nb_earlier=${nb_holder#"$SLURM_JOB_ID "}
    nb_pid="$nb_attempt/%(pid)s.$SLURM_JOB_ID"
    if [ "$nb_earlier" != "$nb_holder" ] && [ "${nb_earlier%%%% *}" -lt "${SLURM_RESTART_COUNT:-0}" ] 2> /dev/null; then
        # Nor does one after an end that nobody had asked for: RequeueExit of slurm.conf does not honour --no-requeue.
        if [ -e "$nb_attempt/%(exit_code)s" ] && [ ! -e "$nb_pid" ]; then
            rm -f "$nb_mine"
            echo "job $SLURM_JOB_ID ends: its script ended with $(nb_read "$nb_attempt/%(exit_code)s") by itself, and" \
                "Slurm started it again (RequeueExit in slurm.conf?)" >&2
            exit %(already_claimed)d
        fi
        mv -f "$nb_mine" "$nb_attempt/%(claim)s"
        nb_holder=$(nb_read "$nb_attempt/%(claim)s")
    fi
    rm -f "$nb_mine"
    if [ "$nb_holder" != "$nb_start" ]; then
        echo "job $SLURM_JOB_ID ends: job ${nb_holder%%%% *} has claimed $nb_attempt (${nb_holder#* })" >&2
        exit %(already_claimed)d
    fi
    rm -f "$nb_attempt/%(exit_code)s" "$nb_pid"
    # The recorder waits in the foreground, where an exit code cannot be lost, and outlives what ends the script. This
    # shell waits in the background, where a signal interrupts it, so that it can hand the signal on. (bash 5.2 can
    # lose the status of a child that ends while a signal interrupts `wait`.)
    (
        # A shell without job control starts background commands with SIGINT and SIGQUIT ignored; undo that.
        trap - INT QUIT
        trap : HUP INT QUIT TERM USR1 USR2
        %(inner)s=$SLURM_JOB_ID sh -c 'echo "$$" > "$0"; exec "$@"' "$nb_pid" %(interpreter)s "$0" "$@"
        nb_code=$?
        printf '%%s\\n' "$nb_code" > "$nb_attempt/.%(exit_code)s.$SLURM_JOB_ID" &&
            mv -f "$nb_attempt/.%(exit_code)s.$SLURM_JOB_ID" "$nb_attempt/%(exit_code)s"
        exit "$nb_code"
    ) <&0 &
    nb_recorder=$!
    nb_term=
    nb_hand_on() {
        [ "$1" != TERM ] || nb_term=1
        kill -s "$1" "$(nb_read "$nb_pid")" 2> /dev/null
    }
    for nb_signal in HUP INT QUIT TERM USR1 USR2; do
        trap "nb_hand_on $nb_signal" "$nb_signal"
    done
    while kill -0 "$nb_recorder" 2> /dev/null; do
        wait "$nb_recorder"
        nb_status=$?
    done
    nb_code=$(nb_read "$nb_attempt/%(exit_code)s" 2> /dev/null)
    # A SIGTERM that ended the ranks of other nodes, and with them the script, may still be on its way to this shell.
    nb_left=%(late_signal)d
    [ "${nb_code:-$nb_status}" != 0 ] && [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] 2> /dev/null || nb_left=0
    while [ -z "$nb_term" ] && [ "$nb_left" -gt 0 ]; do
        sleep 1
        nb_left=$((nb_left - 1))
    done
    # What stays of a script that Slurm ended: a requeue that did so starts it again.
    [ -n "$nb_term" ] || rm -f "$nb_pid"
    exit "${nb_code:-$nb_status}"
fi
unset %(inner)s
# --- the script as the launcher wrote it ---
"""


def read_script(script: Path) -> str:
    """The text of a batch script.

    Raises:
        LaunchRefused: It cannot be read.
    """
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchRefused(f"the batch script cannot be read: {error}", subject=str(script)) from error


def wrap_script(text: str, attempt_dir: Path) -> str:
    """Put the guard between a batch script's #SBATCH lines and its body.

    The shebang and every #SBATCH line stay where sbatch reads them, less `--requeue`, plus `--no-requeue`: a job that
    Slurm starts again behind our back would overwrite its own evidence. A requeue by an administrator keeps the job id
    and adds one to SLURM_RESTART_COUNT, so it takes the claim over and runs again. A second start of the same count,
    which a slurmctld makes that was killed before it had saved the first one, ends at once. So does one after a script
    that ended without a SIGTERM, which RequeueExit of slurm.conf makes: the first start's exit code stands. On several
    nodes a SIGTERM that comes up to `LATE_SIGNAL` seconds after a failure counts as its cause. Less `--wait`, too:
    sbatch would answer only when the job has ended.

    Raises:
        LaunchRefused: The script has no shebang, or one that is not a shell's.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    interpreter = _interpreter(lines[0])
    body = (index for index, line in enumerate(lines[1:], 1) if line.strip() and not line.lstrip().startswith("#"))
    head_end = next(body, len(lines))  # there sbatch stops to read #SBATCH lines
    head = [kept for line in lines[1:head_end] if (kept := _without_own(line)) is not None]
    guard = _GUARD % {
        "attempt": shlex.quote(str(attempt_dir)),
        "interpreter": interpreter,
        "inner": _INNER,
        "record": ATTEMPT_FILE,
        "claim": CLAIM,
        "exit_code": EXIT_CODE,
        "pid": PID,
        "not_visible": NOT_VISIBLE,
        "not_writable": NOT_WRITABLE,
        "already_claimed": ALREADY_CLAIMED,
        "late_signal": LATE_SIGNAL,
    }
    # First among the options: in a heterogeneous job later lines belong to later components.
    return "\n".join((lines[0], "#SBATCH --no-requeue", *head, guard + "\n".join(lines[head_end:])))


def _without_own(line: str) -> str | None:
    """An #SBATCH line without what is decided here; None when nothing of it is left."""
    if not line.startswith("#SBATCH"):
        return line
    kept = _OWN.sub("", line)
    return None if kept != line and kept.strip() == "#SBATCH" else kept


def _interpreter(shebang: str) -> str:
    """The command line that the kernel makes of a shebang."""
    words = shebang[2:].split(maxsplit=1) if shebang.startswith("#!") else []
    program = [Path(word).name for word in " ".join(words).split() if not word.startswith("-")]
    shell = program[1] if program[:1] == ["env"] and len(program) > 1 else "".join(program[:1])
    if shell not in _SHELLS:
        raise LaunchRefused(
            "not a shell script", subject=shebang[:80], advice="A batch script begins with #!/bin/bash or another shell"
        )
    return " ".join(shlex.quote(word) for word in (words if program[0] != "env" else " ".join(words).split()))
