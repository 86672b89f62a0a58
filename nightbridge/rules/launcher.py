"""What the pinned launcher takes, and what survives its batch script."""

from collections.abc import Callable, Iterable, Iterator

from nightbridge.launch.checks import unknown_flags, unsafe_values, wrong_choices
from nightbridge.launch.versions import version_of_ref
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source


def _lines(found: Callable[[Facts], Iterable[tuple[str, str]]]) -> Callable[[Facts], Iterator[str]]:
    return lambda facts: (f"{field}: {reason}" for field, reason in found(facts))


def _version_unknown(facts: Facts) -> Iterator[str]:
    """Flags differ between releases; a branch or commit says which ones only once it was fetched."""
    ref = facts.test.megatron_bridge.commit
    if facts.checkout is None and version_of_ref(ref) is None:
        yield f"git_repos: {ref!r} names no version, so the newest flags are assumed until the code has been fetched"


RULES = (
    *from_source(
        "Megatron-Bridge: scripts/performance/argument_parser.py of the pinned version",
        Rule(
            "flag-exists",
            "error",
            ("cmd_args", "git_repos"),
            _lines(lambda facts: unknown_flags(facts.test, facts.known)),
            alone=True,
            why="The launcher's parser exits on an option that its version does not have.",
        ),
        Rule(
            "choice",
            "error",
            ("cmd_args", "git_repos"),
            _lines(lambda facts: wrong_choices(facts.test, facts.known)),
            alone=True,
            why="The launcher's parser exits on a value that is not among an option's choices.",
        ),
        Rule("version-unknown", "warning", ("git_repos",), _version_unknown),
    ),
    *from_source(
        "NeMo-Run: the template of its batch script",
        Rule(
            "launch-safe",
            "error",
            ("cmd_args", "extra_cmd_args", "extra_env_vars", "extra_container_mounts"),
            _lines(lambda facts: unsafe_values(facts.test)),
            alone=True,
            why="The batch script quotes arguments in a way that some characters do not survive.",
        ),
    ),
)
