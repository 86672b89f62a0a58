"""A user's first steps: `init` and `import-script` write files, `explain` says what a key means, `demo` runs it all.

`deploy` and `doctor` make a site ready for its nights.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import nightbridge
from nightbridge.cli.options import (
    EXIT_INTERNAL,
    EXIT_INVALID,
    JsonOption,
    WorkspaceOption,
    load_site,
    note_no_site,
    open_site_store,
    with_site_options,
)
from nightbridge.cli.output import is_terminal, note, print_all, show, verdict_lines, write_file
from nightbridge.errors import InvalidInput
from nightbridge.files import open_workspace

if TYPE_CHECKING:
    from nightbridge.config.script_import import OptionsDiff
    from nightbridge.models import NightReport, SiteChoice

VERSION, IMAGE = "v0.4.2", "nvcr.io#nvidia/nemo:26.04.01"
"""A release and the image that it was published with."""
MIMO_IMAGE = "nvcr.io#nvidia/nemo:26.06.00"
NEMO_RUN = "211d4b7439c1b5ee401cfbaba1765454ed438ff5"

TEST = """\
# {about}. Whatever is not written here is the recipe's own.
# `nightbridge explain cmd_args.mb` says what a key means; `nightbridge rules` what is checked.

name = {name}
test_template_name = "MegatronBridge"
time_limit = "00:30:00"    # of the Slurm job

[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = {version}    # a tag or commit stays what it is; a branch is resolved every night
mount_as = "/opt/Megatron-Bridge"

[nemo_run_repo]
url = "https://github.com/NVIDIA-NeMo/Run.git"
commit = {nemo_run}

[cmd_args]
gpu_type = {gpu_type}
num_gpus = {gpus}
container_image = {image}
model_family_name = {family}
model_recipe_name = {recipe}
compute_dtype = "bf16"
max_steps = {steps}
# mb = [1, 2]    # a list is a sweep: one run for each value

[harvest]
checkpoint = "none"    # or "last", "all"

# [gate]
# step_time = 0.05    # widest band, relative
"""

SITE = """\
# One cluster and one store: `--system {site}`, or found by itself in this folder as site.toml.

workspace = {workspace}    # the compute nodes must see it under the same path

[cluster]
kind = "slurm"
name = {cluster}
partition = {partition}
account = {account}
containers = "pyxis"

[store]
url = {store}    # or s3://bucket/prefix, with endpoint_url, access_key and secret_key
"""


def init(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe of Megatron-Bridge, as llama3_8b.")],
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="How many GPUs train.")] = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu-type", help="h100, b200, gb200, ...")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of a run.")] = None,
    version: Annotated[str, typer.Option("--version", help="A release of Megatron-Bridge.")] = VERSION,
    image: Annotated[str, typer.Option("--image", help="Container image.")] = IMAGE,
    workspace: Annotated[str | None, typer.Option("--workspace", help="Folder that the compute nodes see.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="What you call the cluster.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm's.")] = None,
    store: Annotated[str | None, typer.Option("--store", help="file:// or s3:// URL.")] = None,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go.")] = Path(),
) -> None:
    """Write a commented test file and a site file, from flags; or on a terminal from a few questions.

    An existing site file stays as it is.
    """
    family = _family_of(recipe, version)
    test, site = folder / f"{recipe}.toml", folder / "site.toml"
    if test.exists():
        raise InvalidInput("exists already", subject=str(test), advice="Name another folder with --out, or remove it")
    kind = _prompt("GPU type", gpu_type, "h100")
    count = _prompt("GPUs", gpus, 8)
    values = {
        "name": f"{recipe}_{kind}",
        "recipe": recipe,
        "family": family,
        "version": version,
        "nemo_run": NEMO_RUN,
        "image": image,
        "gpu_type": kind,
        "gpus": count,
        "steps": _prompt("steps of a run", steps, 50),
    }
    text = TEST.format(about=f"{recipe} on {count} {kind} GPUs", **_quoted(values))
    if not site.exists():
        named = _prompt("workspace, a folder that the compute nodes see", workspace, "/lustre/nightbridge")
        place = Path(os.path.expanduser(named)).absolute()
        settings = {
            "workspace": str(place),
            "cluster": _prompt("name of the cluster", cluster, "slurm"),
            "partition": _prompt("partition", partition, "batch"),
            "account": _prompt("account", account, "default"),
            "store": _prompt("store", store, f"file://{place}/store"),
        }
        write_file(site, SITE.format(site=site, **_quoted(settings)).encode())
        note(f"written: {site}")
    write_file(test, text.encode())
    note(f"written: {test}")
    options = f" --system {site}"
    note(f"next: nightbridge doctor{options}; nightbridge validate {test}; nightbridge run {test}{options}")


def _quoted(values: Mapping[str, Any]) -> dict[str, str]:
    """Each value as TOML has it."""
    from nightbridge.config.documents import toml_value

    return {name: toml_value(value) for name, value in values.items()}


def import_script(
    script: Annotated[
        Path, typer.Argument(metavar="FILE.sh", help="A bash script that starts a program with torchrun.")
    ],
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable that the script takes; may be repeated."),
    ] = None,
    image: Annotated[str, typer.Option("--image", help="Container image; a script names none.")] = MIMO_IMAGE,
    file: Annotated[Path | None, typer.Option("--out", metavar="FILE.toml", help="The test file to write.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Turn a launch script of Megatron-LM's two grids into a test file, and compare both command lines.

    The script is read and never executed. Exit code 2: an option of the script is missing from the test's command line,
    or has another value.
    """
    from nightbridge.config.script_import import compare_command_lines, import_script

    target = file or Path(f"{script.stem}.toml")
    if target.exists():
        raise InvalidInput("exists already", subject=str(target), advice="Name another file with --out, or remove it")
    variables = dict(text.split("=", 1) for text in given or () if "=" in text)
    if len(variables) != len(given or ()):
        raise InvalidInput(
            "is not NAME=VALUE, or written twice", subject="--set", advice="Write it as --set TRAIN_ITERS=20"
        )
    imported = import_script(script, image, variables)
    write_file(target, imported.toml.encode())
    compared = compare_command_lines(imported, target)
    show(as_json, {"file": str(target), **compared.model_dump()}, lambda: _comparison(compared, target))
    return EXIT_INVALID if compared.only_script or compared.different else 0


def _comparison(compared: "OptionsDiff", target: Path) -> Iterator[str]:
    yield f"written: {target}"
    yield f"only in the script: {' '.join(compared.only_script) or 'nothing'}"
    yield f"only in the test, set by nightbridge: {' '.join(compared.only_test) or 'nothing'}"
    yield from (f"another value: {difference}" for difference in compared.different)


def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="As cmd_args.mb, mb, or a table such as gate.")],
    as_json: JsonOption = False,
) -> None:
    """Describe a key of a test file: its values, its default, and for a table its keys."""
    from nightbridge.config.schema import explain_key

    found, lines = explain_key(key)
    show(as_json, found, lambda: lines)


def _family_of(recipe: str, version: str) -> str:
    """The family of a recipe in a release.

    Raises:
        InvalidInput: The release is not known, or has no such recipe.
    """
    from difflib import get_close_matches

    from nightbridge.launch.shipped import released_recipes
    from nightbridge.launch.versions import version_of_ref

    pinned = version_of_ref(version)
    families = released_recipes(pinned) if pinned else {}
    for family, names in families.items():
        if recipe in names:
            return family
    known = sorted(name for names in families.values() for name in names)
    near = get_close_matches(recipe, known, n=3) or known
    advice = f"Name one of {', '.join(near)}" if near else "Name a release, as v0.4.2, with --version"
    raise InvalidInput(f"no such recipe in {version}", subject=recipe, advice=advice)


def _prompt(question: str, given: Any, usual: Any) -> Any:
    """What a flag says, else what a person answers on a terminal, else what is usual."""
    if given is not None:
        return given
    return typer.prompt(question, default=usual, err=True) if is_terminal(sys.stdin) else usual


def demo(
    workspace: WorkspaceOption = None,
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Only make the launcher's environment and the practice repositories.")
    ] = False,
) -> int:
    """Run the whole pipeline on this machine, from nothing: two tests, several nights, one with a slower commit.

    Needs a checkout of nightbridge, which holds the practice workload. A regression is no failure of the demo: its exit
    code is that of the other verdicts.
    """
    examples = Path(nightbridge.__file__).resolve().parents[1] / "examples"
    if not (examples / "practice").is_dir():
        advice = "Clone the repository of nightbridge and run `make demo` there"
        raise InvalidInput("the practice workload is not installed", subject=str(examples), advice=advice)
    from nightbridge.launch.launch_plan import check_workspace
    from nightbridge.models import SiteChoice
    from nightbridge.models.verdict import exit_code_of

    folder = Path(workspace or ".nightbridge").expanduser().absolute()
    check_workspace(folder)
    # Prefect reads its settings once, when it is imported: the demo has its own server and database, and logs less.
    open_workspace(folder)
    home = folder / "demo-prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_HOME=str(home),
        PREFECT_LOGGING_LEVEL="ERROR",
        # On a slow machine the server meets a locked database, logs that at length, and tries again.
        PREFECT_LOGGING_SERVER_LEVEL="CRITICAL",
    )
    nights = practice_nights(examples)
    if prepare_only:
        repositories = nights.prepare(folder)
        note(f"launcher environment and practice repositories are ready: {repositories.bridge_url}")
        return 0
    site = folder / "demo" / "site.toml"
    shown = site.relative_to(Path.cwd()) if site.is_relative_to(Path.cwd()) else site
    options = SiteChoice(system=str(shown)).as_options()
    note(f"{len(nights.NIGHTS)} nights of two tests, about a minute in all")

    def show_night(night: Any, report: "NightReport") -> None:
        note(f"night {report.night}: {night.subject}")
        print_all(verdict_lines(report.verdicts, options))

    reports = nights.run_demo(folder, show_night)
    print_all(
        [
            f"report of the night that slowed down: {nights.slow_night(reports).report}",
            f"report of the last night: {reports[-1].report}",
            f"next: nightbridge history llama-small{options}",
        ]
    )
    verdicts = [verdict for report in reports for verdict in report.verdicts]
    return exit_code_of(verdict.status for verdict in verdicts if verdict.exit_code != 1)


def practice_nights(examples: Path) -> ModuleType:
    """Import `examples.practice.demo` from this folder, whatever else is called `examples` where Python looks."""
    package = ModuleType("examples")
    package.__path__ = [str(examples)]
    sys.modules["examples"] = package
    return import_module("examples.practice.demo")


@with_site_options("system", "cluster", "store", "workspace")
def deploy(
    choice: "SiteChoice",
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="Scenarios; what prefect.yaml defines when left out."),
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help='When nights begin, such as "0 1 * * *".')] = None,
    timezone: Annotated[str | None, typer.Option("--timezone", metavar="TZ", help="Zone of the schedules.")] = None,
    git: Annotated[
        str | None, typer.Option("--git", metavar="URL", help="Workers pull the scenarios from this repository.")
    ] = None,
    branch: Annotated[str | None, typer.Option("--branch", help="Its branch.")] = None,
    git_token: Annotated[
        str | None, typer.Option("--git-token", metavar="BLOCK", help="Secret block with a token for it.")
    ] = None,
) -> None:
    """Make the deployments for a site on the Prefect server: nightly, test, bisect, attribute, prune and so on.

    PREFECT_API_URL names the server. Work pool, work queues, block types, result storage and the choices of the forms
    are made as well. Run it again after a change of the scenarios: what exists is updated.
    """
    from nightbridge.flows.deploy import Request, deploy

    pulled = {"git": git, "branch": branch, "git_token": git_token}
    for line in deploy(Request(files=tuple(files or ()), choice=choice, cron=cron, timezone=timezone, **pulled)):
        note(line)


@with_site_options("system", "cluster", "store", "workspace")
def doctor(choice: "SiteChoice", as_json: JsonOption = False) -> int:
    """Check what a night needs on this host: workspace, git, launcher environment, containers, cluster, store.

    Nothing is submitted and nothing is created. Exits with 4 when a check fails.
    """
    from nightbridge.doctor import Check, checks

    site = load_site(choice)
    note_no_site(choice)
    done: list[Check] = []
    for check in checks(site, lambda: open_site_store(site)):
        done.append(check)
        if not as_json:
            print_all([str(check)])
    bad = [check.subject for check in done if not check.healthy]
    need = "needs" if len(bad) == 1 else "need"
    summary = f"{len(bad)} of {len(done)} {need} you: {', '.join(bad)}" if bad else f"all {len(done)} checks passed"
    show(as_json, {"healthy": not bad, "findings": done}, lambda: [summary])
    return EXIT_INTERNAL if bad else 0
