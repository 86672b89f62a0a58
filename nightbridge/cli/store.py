"""Stored files and disk space: `events`, `verify`, `fetch` and `prune`."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nightbridge.cli.options import JsonOption, RunKeyArgument, load_site, open_site_store, with_site_options
from nightbridge.cli.output import note, note_all, print_all, show, show_progress, write_file
from nightbridge.errors import DamagedData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd

    from nightbridge.harvest.retention import RunRemoval
    from nightbridge.models import Site, SiteChoice
    from nightbridge.prune import Old, Usage

_KEPT_RUNS = (
    "stored runs beyond their limits that a verdict of a run that stays, the next baseline or a decision refers to, or "
    "that were written today"
)


def events(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An event file, or a folder to search for them.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.parquet", help="Write the table there.")] = None,
) -> None:
    """Read TensorBoard event files into a table, up to the first damage of each; exit code 4 where there is any."""
    import pandas as pd

    from nightbridge.outputs.event_files import find_scalars

    if not path.exists():
        raise InvalidInput("no such file or folder", subject=str(path), advice="Name an event file or its folder")
    if out is not None and out.suffix != ".parquet":
        raise InvalidInput("not a kind of table", subject=str(out), advice="End its name with .parquet")
    found, content = find_scalars(path.resolve())
    table = pd.read_parquet(io.BytesIO(content))
    note_all(found.damage)
    if others := sorted(found.skipped.items()):
        note(f"not scalars, left out: {', '.join(f'{count} {kind}' for kind, count in others)}")
    if not len(table) and not found.damage:
        raise InvalidInput(
            "no TensorBoard scalars", subject=str(path), advice="Name a folder with events.out.tfevents.*"
        )
    if out is None:
        print_all(_tag_lines(table))
    else:
        write_file(out, content)
        note(f"{len(table)} scalars written to {out}")
    if found.damage:
        advice = "The table has everything before the damage"
        raise DamagedData("not every event file is whole", subject=str(path), advice=advice)


def checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of iter_* ones.")],
    deep: Annotated[bool, typer.Option("--deep", help="Load what is whole, too: runs the code pickled in it.")] = False,
    python: Annotated[
        str, typer.Option("--python", help="For --deep: an interpreter with torch, or a command that runs one.")
    ] = "python3",
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and check it by its own checksums; without --deep nothing of it is loaded.

    Prints for each: verified, unproven (nothing is wrong, but a part of it has no checksum), in_progress, or damaged.
    """
    from nightbridge.config.documents import check_name
    from nightbridge.outputs.checkpoints import checkpoints_in, state_in_child

    if not folder.is_dir():
        raise InvalidInput("no such folder", subject=str(folder), advice="Name a checkpoint's folder")
    check_name(folder.resolve())
    paths = checkpoints_in(folder.resolve())
    if not paths:
        advice = "Name a checkpoint's folder, or that of its iter_* folders; links are not followed"
        raise InvalidInput("no checkpoint", subject=str(folder), advice=advice)
    judged = [
        {"path": path, "state": state, "reason": reason} for path in paths for state, reason in [state_in_child(path)]
    ]
    for each in judged if deep else ():
        if each["state"] in ("verified", "unproven"):
            each |= _loaded(each, python)
    show(as_json, judged, lambda: (f"{each['path']}: {each['state']}  {each['reason']}".rstrip() for each in judged))
    if bad := [str(each["path"]) for each in judged if each["state"] in ("damaged", "in_progress")]:
        advice = "Use an older checkpoint, or one that is verified"
        raise DamagedData(
            f"{len(bad)} of {len(judged)} checkpoints are not whole", subject=", ".join(bad), advice=advice
        )


def _loaded(judged: "Mapping[str, object]", python: str) -> dict[str, object]:
    """What loading a checkpoint changes about how it was judged."""
    from nightbridge.outputs.torch_check import load_with_torch

    try:
        loaded = load_with_torch(Path(str(judged["path"])), python)
    except DamagedData as error:
        return {"state": "damaged", "reason": error.what}
    return {"reason": "; ".join(filter(None, (str(judged["reason"]), str(loaded)))), "loaded": loaded.model_dump()}


@with_site_options("system", "store", "workspace")
def verify(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not only stored checksums.")] = False,
) -> None:
    """Check every stored object of a run against its manifest; name objects that do not belong to it."""
    from nightbridge.harvest.restore import verify_content, verify_run
    from nightbridge.nights.records import find_run
    from nightbridge.report.queries import verify_stored

    opened = open_site_store(load_site(choice))
    check = verify_content if deep else verify_run
    found = verify_stored(opened, find_run(opened, run_key), check=check, on_progress=show_progress)
    note_all(f"not of this run: {path}" for path in found.foreign)
    if not found.is_whole:
        raise DamagedData("\n  ".join(found.problems), subject=found.url, advice="Harvest the run again")
    print_all([f"{found.url}: every object is there and whole"])


@with_site_options("system", "store", "workspace")
def fetch(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to restore the run into.")],
    only: Annotated[
        Literal["checkpoint", "tensorboard", "logs"] | None,
        typer.Option("--only", help="Just this, straight into DEST: a training can load checkpoints from there."),
    ] = None,
) -> None:
    """Download a stored run and verify every byte; the same command resumes an interrupted download."""
    from nightbridge.harvest.manifest import last_attempt_prefix
    from nightbridge.harvest.restore import fetch_run
    from nightbridge.nights.records import find_run

    opened = open_site_store(load_site(choice))
    manifest = fetch_run(opened, last_attempt_prefix(opened, find_run(opened, run_key)), dest, show_progress, only)
    print_all([f"{dest}: {len(manifest.files)} files of {manifest.run_key}, attempt {manifest.attempt}"])


@with_site_options("system", "store", "workspace")
def prune(
    choice: "SiteChoice",
    days: Annotated[float, typer.Option("--days", min=1, help="Remove what was not used for so many days.")] = 30,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Of the rest keep so many, per repository.")] = 20,
    max_gb: Annotated[float | None, typer.Option("--max-gb", min=0, help="Largest size of all images.")] = None,
    run_days: Annotated[
        float | None,
        typer.Option("--run-days", min=1, help="What runs wrote: remove what is stored and ended so many days ago."),
    ] = None,
    store_days: Annotated[
        float | None, typer.Option("--store-days", min=1, help="Stored runs: remove those of so many days ago.")
    ] = None,
    store_nights: Annotated[
        int | None, typer.Option("--store-nights", min=1, help="Stored runs: keep so many nights of each test.")
    ] = None,
    store_gb: Annotated[
        float | None, typer.Option("--store-gb", min=0, help="Stored runs: largest size of each test's.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without this they are only listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List old checkouts, images, launcher environments and stored runs, with reasons, and remove them with --yes.

    Never what is still needed. What runs wrote in the workspace, their checkpoints included, goes with --run-days
    alone, and only once it is stored; the id of such a night is refused from then on.

    Stored runs go only beyond the limits of the site's [store.retention], or of --store-days, --store-nights and
    --store-gb; never one that a baseline, the verdict of a run that stays, or an accepted decision refers to.
    """
    from nightbridge.models import RetentionPolicy
    from nightbridge.prune import Policy, find_old, remove_old

    site = load_site(choice)
    policy = Policy(days=days, keep=keep, max_gb=max_gb, run_days=run_days)
    old = find_old(site, policy, lambda: open_site_store(site))
    if yes:
        old = remove_old(site, old)
    given = {"days": store_days, "nights": store_nights, "max_gb": store_gb}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    old = old.model_copy(update={"runs": tuple(_prune_store(site, limits, yes))})
    document = {"removed": yes, "removals": old.removals, "runs": old.runs}
    show(as_json, document, lambda: _removal_lines(old))
    if not as_json:
        note(f"removed {old}" if yes else f"would remove {old}; --yes removes them")
        kept = f"kept: what was used in the last {days:g} days, up to {keep} of a kind, and what a live job names"
        is_limited = limits or site.store_settings.retention != RetentionPolicy()
        stored = f"; {_KEPT_RUNS if is_limited else 'stored runs have no limit set'}"
        note(f"{kept}{stored}. `nightbridge du` shows what all of it takes")


@with_site_options("system", "store", "workspace")
def du(choice: "SiteChoice", as_json: JsonOption = False) -> None:
    """Show what workspace and store take, part by part and test by test; every object of the store is listed."""
    from nightbridge.prune import Usage, disk_usage

    site = load_site(choice)
    opened = open_site_store(site)
    sizes: Counter[str] = Counter()
    items: Counter[str] = Counter()
    for found in opened.list(""):
        parts = found.key.split("/")
        part = f"store, {' of '.join(parts[:2]) if parts[0] == 'runs' else parts[0]}"
        sizes[part] += found.size
        items[part] += 1
    parts_of_store = [
        Usage(what=part, where=opened.url, items=items[part], size=size) for part, size in sizes.most_common()
    ]
    usages = [*disk_usage(site.workspace, site.environments_dir, site.images_dir), *parts_of_store]
    total = sum(usage.size for usage in usages)
    show(as_json, {"usages": usages, "total": total}, lambda: map(_usage_line, usages))
    if not as_json:
        note(f"{total / 1e9:.2f} GB in all; `nightbridge prune` lists what is not needed any more")


def _usage_line(usage: "Usage") -> str:
    return f"{usage.size / 1e6:12,.1f} MB {usage.items:8,} items  {usage.what:32} {usage.where}"


def _tag_lines(table: "pd.DataFrame") -> Iterator[str]:
    yield "\t".join(("tag", "points", "first_step", "last_step", "last_value"))
    for tag, rows in table[~table["superseded"]].groupby("tag"):
        points = rows.sort_values("step")
        first, last, value = points["step"].iloc[0], points["step"].iloc[-1], points["value"].iloc[-1]
        yield f"{tag}\t{len(points)}\t{first}\t{last}\t{value:.6g}"


def _prune_store(site: "Site", limits: Mapping[str, float], yes: bool) -> "list[RunRemoval]":
    """The stored runs beyond the limits: those that were removed, or those that would be."""
    from nightbridge.harvest.retention import find_old_runs, remove_runs
    from nightbridge.models import RetentionPolicy

    policy = site.store_settings.retention.model_copy(update=dict(limits))
    if policy == RetentionPolicy():
        return []  # the store is not even listed
    opened = open_site_store(site)
    runs = find_old_runs(opened, policy)
    return remove_runs(opened, runs, show_progress) if yes else runs


def _removal_lines(found: "Old") -> Iterator[str]:
    for removal in found.removals:
        yield f"{removal.path}  {removal.size / 1e6:.0f} MB  {removal.last_used:%Y-%m-%d}  {removal.reason}"
    for old in found.runs:
        yield f"{old.url}  {old.run.size / 1e6:.0f} MB  {old.run.stored_at:%Y-%m-%d}  {old.reason}"
