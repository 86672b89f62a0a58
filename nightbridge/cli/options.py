"""Arguments and options that commands share, and the site and the store that they name."""

import os
import socket
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import typer

from nightbridge.cli.output import note, note_all
from nightbridge.errors import InvalidInput

if TYPE_CHECKING:
    from nightbridge.models import SecretRef, Site, SiteChoice
    from nightbridge.store.object_store import ObjectStore

SITE_VARIABLE = "NIGHTBRIDGE_SITE"
"""The environment variable that names the site file."""

EXIT_INVALID, EXIT_CANCELLED, EXIT_INTERNAL = 2, 3, 4

_R = TypeVar("_R")

SiteOption = Literal["system", "cluster", "store", "workspace"]

RUN_HELP = "A run key; or TEST, TEST@NIGHT, TEST@last-good, or last."
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
WorkspaceOption = Annotated[str | None, typer.Option("--workspace", help="Folder that the compute nodes see, too.")]
TestsDirOption = Annotated[
    list[Path] | None, typer.Option("--tests-dir", help="Folder of tests that a scenario names; may be repeated.")
]
ScenarioArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A test or scenario file.")]
RunKeyArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
TestIdArgument = Annotated[
    str, typer.Argument(metavar="TEST", help="A test's id; or TEST@NIGHT, last or a run key: its history until then.")
]

_SITE_OPTIONS: Mapping[SiteOption, Any] = {
    "system": Annotated[str | None, typer.Option("--system", help="Site or CloudAI system file, or a Site block.")],
    "cluster": Annotated[
        str | None, typer.Option("--cluster", help="local, slurm, pyslurm, auto, a file, or a Slurm Cluster block.")
    ],
    "store": Annotated[str | None, typer.Option("--store", help="file:// or s3:// URL, or a Harvest Store block.")],
    "workspace": WorkspaceOption,
}


def with_site_options(*names: SiteOption) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Give a command these options, which name a site; its first parameter receives them as a `SiteChoice`."""

    def decorate(command: Callable[..., _R]) -> Callable[..., _R]:
        @wraps(command)
        def with_choice(**given: Any) -> _R:
            from nightbridge.models import SiteChoice

            named = SiteChoice.of({name: given.pop(name) for name in names})
            return command(_or_usual_site(named) if "system" in names else named, **given)

        own = tuple(signature(command).parameters.values())[1:]
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_SITE_OPTIONS[name]) for name in names
        ]
        # typer reads both, and resolves annotations, which name no class that only type checkers import.
        with_choice.__signature__ = Signature((*own, *added))  # type: ignore[attr-defined]
        with_choice.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
        return with_choice

    return decorate


def _or_usual_site(choice: "SiteChoice") -> "SiteChoice":
    """The usual site where a command names nothing of one: an option may stand for another place, as the demo's.

    It is that of NIGHTBRIDGE_SITE, else this folder's, else the user's own.
    """
    if any(choice.parameters().values()):
        return choice
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = (path for path in (Path("site.toml"), home / "nightbridge" / "site.toml") if path.is_file())
    named = os.environ.get(SITE_VARIABLE)
    found = Path(named).expanduser() if named else next(places, None)
    if found is None:
        return choice
    note(f"site: {found}")
    return choice.model_copy(update={"system": str(found)})


def note_no_site(choice: "SiteChoice") -> None:
    """Say what stands in for a site that nobody has named: jobs on this machine may not be what is meant."""
    if not (choice.system or choice.cluster):
        note(f"no site named: this is the embedded cluster (--cluster local); name one by --system or {SITE_VARIABLE}")


def load_site(choice: "SiteChoice") -> "Site":
    """Return the site that a choice names; Prefect is loaded only for a name that must be a block's."""
    from nightbridge.config.sites import may_have_blocks, no_block, plain_site

    plain = plain_site(choice)
    if plain is None:
        if not may_have_blocks():
            raise no_block(choice)
        _knock_at_server(choice)
        from nightbridge import blocks
        from nightbridge.flows.server import reach_blocks

        reach_blocks(choice)
        return blocks.load_site(choice)
    site, warnings = plain
    note_all(warnings)
    return site


def _knock_at_server(choice: "SiteChoice") -> None:
    """Find a server of PREFECT_API_URL that is not there, before Prefect is imported and tries for longer."""
    from nightbridge.config.sites import no_block

    address = urlsplit(os.environ.get("PREFECT_API_URL", ""))
    if not address.hostname or any(name.lower().endswith("_proxy") for name in os.environ):
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=0.5).close()
    except OSError as error:
        raise no_block(choice, f"no Prefect server answers at {address.hostname}:{port}") from error


def open_site_store(site: "Site") -> "ObjectStore":
    """Open the site's store."""
    from nightbridge.store.object_store import open_store

    settings = site.store_settings
    return open_store(settings, block_values(settings.access_key, settings.secret_key))


def check_folder(path: Path | None) -> None:
    """Refuse a file that an option names and whose folder does not exist, before the work begins."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidInput("its folder does not exist", subject=str(path), advice="Create it, or name another file")


def refuse_ignored(where: str, given: Mapping[str, object]) -> None:
    """Refuse options that have no effect `where`, instead of leaving them out without a word."""
    if named := ", ".join(name for name, value in given.items() if value):
        raise InvalidInput(f"has no effect {where}", subject=named, advice="Leave it out")


def named_run(site: "Site", name: str) -> str:
    """The run key that a name means on the command line; the store is opened only for a short name."""
    from nightbridge.models import is_run_key
    from nightbridge.nights.records import find_run

    return name if is_run_key(name) else find_run(open_site_store(site), name)


def block_values(*secrets: "SecretRef | None") -> Callable[[str], str] | None:
    """Return the reader of Prefect blocks, or None if none of these secrets is in a block: Prefect stays unloaded."""
    if not any(secret and secret.source == "block" for secret in secrets):
        return None
    from nightbridge.flows.server import reach_server
    from nightbridge.tasks.site_access import block_value

    reach_server()
    return block_value
