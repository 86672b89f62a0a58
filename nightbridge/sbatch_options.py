"""The options of sbatch: which exist, how they are parsed on a command line and in a batch script (Slurm 25.05).

The sbatch shim, pyslurm and the embedded cluster parse with these tables. Standard library only: the embedded
cluster's srun starts many times a night and must start fast.
"""

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nightbridge.errors import InvalidInput

Takes = Literal["nothing", "value", "maybe"]
"""Whether an option is followed by a value; `maybe` only as --name=value, or -Kvalue."""


@dataclass(frozen=True)
class OptionTable:
    """The options of one command: `takes` by long name, `short` letter to long name, `refused` with the reason."""

    command: str
    takes: Mapping[str, Takes]
    short: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)


def takes(*, values: str, nothing: str, maybe: str) -> dict[str, Takes]:
    """What each of some long options, separated by spaces, takes."""
    kinds: dict[Takes, str] = {"value": values, "nothing": nothing, "maybe": maybe}
    return {name: kind for kind, names in kinds.items() for name in names.split()}


COMMON = takes(
    values="""
    account acctg-freq bb bbf begin chdir clusters comment constraint container container-id core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export extra
    extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
    job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile
    nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition
    power prefer priority profile qos reservation segment signal sockets-per-node switches thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
    """,
    nothing="contiguous help hold overcommit oversubscribe quiet reboot spread-job use-min-nodes verbose version",
    maybe="exclusive nice no-kill propagate resv-ports",
)
"""Options that sbatch and srun have in common."""

COMMON_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "V": "version", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error",
    "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip

SBATCH = OptionTable(
    command="sbatch",
    takes=COMMON
    | takes(
        values="array batch cluster-constraint export-file kill-on-invalid-dep wrap",
        nothing="ignore-pbs no-requeue parsable requeue stepmgr test-only wait",
        maybe="get-user-env",
    ),
    short=COMMON_SHORT | {"a": "array", "W": "wait"},
)

OWN_OPTIONS = frozenset({"requeue", "no-requeue", "parsable", "job-name", "quiet", "verbose", "wait"})
"""Options that nightbridge decides itself. A requeue behind our back would overwrite the job's evidence; the job's name
is the attempt's; and a submission does not wait for the job's end."""

SUBMITS_NOTHING = frozenset({"help", "test-only", "version"})
"""Options with which sbatch answers a question."""

NOT_ONE_JOB: Mapping[str, tuple[str, str]] = {
    "array": ("makes several jobs of an attempt, which has one", "remove the option; `iterations` repeats a test"),
    "clusters": (
        "sends the job to another cluster, where it is not looked for",
        "remove the option, and run this test with a site file of that cluster",
    ),
    "wrap": ("runs a command instead of the launcher's script", "remove the option"),
    **dict.fromkeys(sorted(SUBMITS_NOTHING), ("submits nothing", "remove the option")),
}
"""Options with which an attempt has no job, several, or one that is not found: what they do, and the way out."""


def option_names(word: str) -> set[str]:
    """The long names of the options of sbatch in one word; none for another word, and for a plugin's option."""
    try:
        named, _ = split_options([word, ""], SBATCH)
    except InvalidInput:
        return set()
    return set(named)


def split_options(arguments: Sequence[str], table: OptionTable) -> tuple[dict[str, str], list[str]]:
    """Read the options up to the first word that is none.

    Returns:
        The options by long name, the last of each; a bare option's value is empty. And the remaining words.

    Raises:
        InvalidInput: An option is unknown to Slurm, lacks its value, or is refused by the table.
    """
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        for name, value in _read_word(word, rest, table):
            if name in table.refused:
                raise InvalidInput(f"--{name} is not possible here: {table.refused[name]}", subject=table.command)
            options[name] = value
    return options, rest


def _read_word(word: str, rest: list[str], table: OptionTable) -> Iterable[tuple[str, str]]:
    """The options of one word: `--name`, `--name=value`, `-x`, `-xvalue`, `-xyz`. May take its value from `rest`."""
    if word.startswith("--"):
        written, equals, value = word[2:].partition("=")
        name = _long_name(written, table)
        if not equals and table.takes[name] == "value":
            value = _next_value(word, rest, table)
        yield name, value
        return
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = table.short.get(letter, "")
        if not name:
            raise InvalidInput(f"invalid option -- '{letter}'", subject=table.command)
        if table.takes[name] == "nothing":
            yield name, ""
            continue
        value = letters.removeprefix("=")
        if not value and table.takes[name] == "value":
            value = _next_value(f"-{letter}", rest, table)
        yield name, value
        return


def _long_name(written: str, table: OptionTable) -> str:
    """The option that is meant: getopt takes any beginning that only one has, and Slurm one name besides."""
    meant = {written} & table.takes.keys() or {name for name in table.takes if written and name.startswith(written)}
    if written == "cluster":
        return "clusters"
    if len(meant) > 1:
        raise InvalidInput(f"option '--{written}' is ambiguous: {', '.join(sorted(meant))}", subject=table.command)
    if not meant:
        raise InvalidInput(f"unrecognized option '--{written}'", subject=table.command)
    return meant.pop()


def _next_value(option: str, rest: list[str], table: OptionTable) -> str:
    if not rest:
        raise InvalidInput(f"option '{option}' requires an argument", subject=table.command)
    return rest.pop(0)


def script_options(script: str) -> list[str]:
    """The words of a script's #SBATCH lines. They end at the first line that is neither empty nor a comment."""
    words: list[str] = []
    for line in script.splitlines()[1:]:
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            in_line = shlex.split(line.removeprefix("#SBATCH"))
            words += itertools.takewhile(lambda word: not word.startswith("#"), in_line)  # a comment may follow
    return words


_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def parse_time_limit(text: str) -> int | None:
    """Seconds of a Slurm time limit (`1-00:00:00`, `08:00:00`, `30:00`, `30`); None for `infinite` and invalid text."""
    found = _TIME_LIMIT.fullmatch(text.strip())
    if found is None:
        return None
    days, first, second, third = (int(found[name] or 0) for name in ("days", "first", "second", "third"))
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        return ((days * 24 + first) * 60 + second) * 60 + third
    if found["third"] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second
