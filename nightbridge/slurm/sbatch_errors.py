"""sbatch's refusals as errors: wait, look the job up, or change something."""

import re

from nightbridge.errors import ErrorPattern, LaunchRefused, NightbridgeError, StatusUnknown, classify
from nightbridge.slurm.protocol import JobNotAccepted

_MAX_LINES = 6
"""Lines of a refusal without a known reason that its error shows: the last ones."""

CHECK_MUNGE = "Check munge on this host: `munge -n | unmunge`"

# The first pattern that occurs in what sbatch wrote decides. Texts: slurm_errno.c, opt.c and sbatch.c of Slurm 22.05 to
# 26.05. StatusUnknown: the job may exist all the same, so it is looked up by name before the next try.
# JobNotAccepted: there is no job, a later try may work. LaunchRefused: the user has to change something.
_KNOWN: tuple[ErrorPattern, ...] = (
    # What sbatch cannot verify is an answer: slurmctld has the request. A munged that is away when sbatch asks for its
    # credential says "encode", and "REQUEST_".
    ErrorPattern(
        r"RESPONSE_\w+ has authentication error|Munge decode failed",
        StatusUnknown, "slurmctld's answer could not be verified; the job may have been accepted",
        "It is looked up before the next try; check munge on this host: `munge -n | unmunge`",
    ),
    ErrorPattern(
        # Of munged, "Connection refused" says nothing about slurmctld.
        r"Unable to contact slurm controller \(connect failure\)|(?m:^(?!.*Munge).*Connection refused)"
        r"|controller in standby mode",
        JobNotAccepted, "slurmctld cannot be reached", "Will retry; contact the site if this lasts",
    ),
    ErrorPattern(
        r"Socket timed out|Unable to contact slurm controller|Zero Bytes were transmitted|Unexpected message received"
        r"|[Tt]ransport endpoint is not connected|Communication (connection|shutdown) failure"
        r"|Connection (reset|timed out)|Slurm communication error|Header lengths are longer",
        StatusUnknown, "slurmctld stopped answering; the job may have been accepted",
        "It is looked up before the next try",
    ),
    ErrorPattern(
        r"(Protocol authentication error|Invalid authentication credential|Munge encode failed)",
        JobNotAccepted, "authentication with slurmctld failed", CHECK_MUNGE,
    ),
    ErrorPattern(
        r"(?:Assoc|QOS)\w*Submit\w*|MaxSubmitJobs|MaxJobCount",
        JobNotAccepted, "a submit limit of the user, account or QOS is reached",
        "Will retry when jobs have ended",
    ),
    ErrorPattern(
        r"temporarily unable to accept job|Resource temporarily unavailable|Unable to create job record, try again"
        r"|RPC limit exceeded|[Rr]ate limit|the DB index is being set|I/O error writing script/environment"
        r"|[Ss]ubmissions disabled",
        JobNotAccepted, "slurmctld accepts no jobs at the moment", "Will retry",
    ),
    ErrorPattern(
        r"Required (partition|node) not available|Requested nodes are busy",
        JobNotAccepted, "the partition or its nodes are down, drained or reserved", "Will retry; see `sinfo -R`",
    ),
    ErrorPattern(
        r"[Ii]nvalid partition|partition name specified|No partition specified",
        LaunchRefused, "there is no such partition", "Set the cluster's partition to one that `sinfo` lists",
    ),
    ErrorPattern(
        r"[Ii]nvalid account|account/partition combination",
        LaunchRefused, "the account does not exist or may not use this partition",
        "Set the cluster's account to one that `sacctmgr show associations user=$USER` lists",
    ),
    ErrorPattern(
        r"[Ii]nvalid qos|QOS is not permitted|Job's QOS not permitted",
        LaunchRefused, "the QOS does not exist or your account may not use it",
        "Set the cluster's qos to one that `sacctmgr show associations user=$USER format=qos` lists",
    ),
    ErrorPattern(
        r"Invalid --?time|[Ii]nvalid time|time limit is invalid|[Tt]ime limit specification required|WallDuration",
        LaunchRefused, "the time limit is missing, malformed or above the partition's, account's or QOS's",
        "Set time_limit to at most what `sinfo -o '%P %l'` shows",
    ),
    ErrorPattern(
        r"Invalid (--nodes|node count)|not a valid node count|[Nn]ode count (specification|list)"
        r"|[Mm]ore (nodes|processors) requested"
        r"|MaxNode\w*PerJob|Invalid numeric value .* for --nodes",
        LaunchRefused, "the number of nodes is invalid or above a limit",
        "Lower num_gpus, or set gpus_per_node, so that the partition has enough nodes (`sinfo -o '%P %D'`)",
    ),
    ErrorPattern(
        r"[Ii]nvalid (generic resource|GRES|gres)|Invalid Trackable RESource",
        LaunchRefused, "the requested GPUs (gres) do not exist here", "Compare gpus_per_node with `sinfo -o '%P %G'`",
    ),
    ErrorPattern(
        r"node configuration is not available|partition configuration not available|Memory required by task"
        r"|[Ii]nvalid feature|CPU count (specification|per node)|Invalid memory specification",
        LaunchRefused, "no node of the partition can run this", "Compare nodes, CPUs, memory and GPUs with `sinfo -Nl`",
    ),
    ErrorPattern(
        r"reservation", LaunchRefused, "the reservation does not exist or you may not use it",
        "Check the cluster's reservation with `scontrol show reservation`",
    ),
    ErrorPattern(
        r"group not permitted to use this partition|Access/permission denied|Operation not permitted",
        LaunchRefused, "you may not submit there", "Choose another partition or account, or contact the site",
    ),
    ErrorPattern(
        r"violates accounting/QOS policy",
        LaunchRefused, "the job is above a limit of the user, account or QOS",
        "Compare its nodes and time with `sacctmgr show associations user=$USER` and `sacctmgr show qos`",
    ),
    ErrorPattern(
        r"dependency problem|[Ii]nvalid (job )?dependency", LaunchRefused, "the job that it depends on is not there",
        "Check the dependency; jobs are forgotten some time after their end",
    ),
    ErrorPattern(
        r"unrecognized option|invalid option|Invalid --|ambiguous", LaunchRefused, "sbatch does not know an option",
        "Check the cluster's extra_sbatch_args against sbatch(1) of this site",
    ),
)  # fmt: skip

_REASON = r"Batch job submission failed|allocation failure|cli_filter plugin terminated"
_BY_SITE = ErrorPattern(_REASON, LaunchRefused, "the site refused the job", "See the message; contact the site")
"""It adds nothing to the message: a plugin of the site may say why in lines of its own."""

# Where sbatch ends with a reason, the lines before it are a plugin's of the site (job_submit's user_msg), a wrapper's,
# or Slurm's: a limit's name alone, a library function's (`slurm_unpack_received_msg: [...] ...`), munge's.
_HAS_REASON = re.compile(rf"(?m)^(?:\S+: error: )?(?:{_REASON})")
_OF_SLURM = re.compile(rf"(?:\S+: error: )?(?:{_REASON}|[a-z_]*_[a-z_]+: |Munge |(?:Assoc|QOS)\w+\s*$)")


def refusal_of(message: str, subject: str) -> NightbridgeError:
    """The error that fits what sbatch wrote when it refused. Without any of it the job may exist."""
    if not message.strip():
        return StatusUnknown(
            "sbatch ended without an answer; the job may exist",
            subject=subject,
            advice="It is looked up before the next try",
        )
    if known := _first_known(message, subject):
        return known
    said = "; ".join(_lines(message)[-_MAX_LINES:])
    if classify(message, (_BY_SITE,)):
        return _BY_SITE.error(subject, said)
    return LaunchRefused(f"sbatch refused the job: {said}", subject=subject, advice="See sbatch(1)")


def has_reason(message: str) -> bool:
    """Whether sbatch says why it has submitted nothing, or that it cannot tell."""
    return _HAS_REASON.search(message) is not None


def known_refusal_of(message: str, subject: str) -> LaunchRefused | None:
    """What the user has to change, from what sbatch wrote; None for what may pass and for unknown messages."""
    known = _first_known(message, subject)
    return known if isinstance(known, LaunchRefused) else None


def _first_known(message: str, subject: str) -> NightbridgeError | None:
    """The error of the first known refusal that fits, with the line in which that ends, and what the site says.

    Where Slurm gives a reason, the words of the site decide nothing: `rate limit` in them is no busy slurmctld.
    """
    lines = message.splitlines()
    of_slurm = [line for line in lines if _OF_SLURM.match(line)] if has_reason(message) else lines
    decisive = "\n".join(of_slurm)
    known = classify(decisive, _KNOWN)
    if known is None or (found := re.search(known.pattern, decisive)) is None:
        return None
    of_site = _lines("\n".join(line for line in lines if line not in of_slurm))[1 - _MAX_LINES :]
    line = last_line(decisive[: found.end()] + decisive[found.end() :].partition("\n")[0])
    return known.error(subject, "; ".join((*of_site, line)))


def _lines(text: str) -> list[str]:
    return [last_line(line) for line in text.splitlines() if line.strip()]


def last_line(text: str) -> str:
    """The last line with text, without the command's own prefix."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: error: (lua: )?", "", lines[-1]) if lines else ""
