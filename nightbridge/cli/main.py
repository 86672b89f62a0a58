"""The command line: one command for each thing that a person does.

Commands raise `NightbridgeError` and `main` turns it into one message and an exit code. Everything heavier than typer
is imported inside the commands, so that `--help` and `validate` start at once. With `--json` stdout holds one document,
and what is said to people goes to stderr.
"""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from nightbridge import __version__
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.processes import end_after_signals

if TYPE_CHECKING:
    from rich.table import Table

    from examples.practice import demo as nights
    from nightbridge.harvest.retention import RunRemoval
    from nightbridge.models import (
        Checkout,
        ClusterLimits,
        NightReport,
        Scenario,
        SecretRef,
        Site,
        SweepResult,
        TestDefinition,
        Verdict,
    )
    from nightbridge.notify import Notice
    from nightbridge.rules.catalogue import RuleEntry
    from nightbridge.slurm.attempt_files import AttemptContext
    from nightbridge.store.protocol import ObjectStore
    from nightbridge.store.transfers import Progress

EXIT_INVALID, EXIT_INTERNAL, EXIT_INTERRUPTED = 2, 4, 130
EXIT_TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    name="nightbridge",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nightbridge {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # is_eager: answered before anything else of the command line is looked at
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Nightly regression runs of Megatron-Bridge: from a TOML file to a verdict."""


# --- options that commands share -------------------------------------------------------------------------------------

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="Site or CloudAI system file, or a Site block.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="local, slurm, pyslurm, auto, a file, or a Slurm Cluster block.")
]
StoreOption = Annotated[str | None, typer.Option("--store", help="file:// or s3:// URL, or a Harvest Store block.")]
WorkspaceOption = Annotated[str | None, typer.Option("--workspace", help="Folder that the compute nodes see, too.")]
TestsDirOption = Annotated[
    list[Path] | None, typer.Option("--tests-dir", help="Folder of tests that a scenario names; may be repeated.")
]
RunKeyArgument = Annotated[str, typer.Argument(metavar="RUN_KEY", help="The run's name, as reports and jobs show it.")]


# --- commands --------------------------------------------------------------------------------------------------------


@app.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Test and scenario files, and ConfigContainer.yaml files.")
    ],
    as_json: JsonOption = False,
    cluster: ClusterOption = None,
    system: SystemOption = None,
    tests_dir: TestsDirOption = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Fetch the pinned code and check against its own launcher and recipes.")
    ] = False,
    workspace: WorkspaceOption = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs that a ConfigContainer is to run on.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="KEY=VALUE", help="Laid over a ConfigContainer; may be repeated."),
    ] = None,
) -> None:
    """Check tests, scenarios and ConfigContainers and tell every violation; needs no network and no checkout.

    With --cluster or --system the site's limits are asked for and checked, too; with --pinned every test is checked
    against the code that it pins. A ConfigContainer.yaml is what Megatron-Bridge has dumped of a run: its own checks
    are made, and those that it misses.
    """
    site = _site(system, cluster, workspace=workspace) if cluster or system or pinned else None
    limits = _limits(site) if site is not None and (cluster or system) else None
    code = _code_of(site) if site is not None and pinned else _no_code
    reports = [
        _container_validation(file, gpus, override or [])
        if file.suffix in (".yaml", ".yml")
        else _validation(file, tests_dir or [], limits, code)
        for file in files
    ]
    valid = all(report["valid"] for report in reports)
    if as_json:
        _print_json({"valid": valid, "files": reports})
    else:
        for report in reports:
            _print_validation(report)
    raise typer.Exit(0 if valid else EXIT_INVALID)


@app.command()
def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A test or scenario file.")],
    as_json: JsonOption = False,
    cluster: ClusterOption = None,
    system: SystemOption = None,
    tests_dir: TestsDirOption = None,
) -> None:
    """Show the launch plan of every run: command line, environment with secrets masked, resources.

    No checkout is needed: the launcher's version comes from the pin, and folders are placeholders.
    """
    from nightbridge import config
    from nightbridge.launch.plan import placeholder_plan, shell_command
    from nightbridge.rules import check_scenario
    from nightbridge.secrets import MASK

    site = _site(system, cluster)
    scenario = check_scenario(config.load(file, tests_dirs=tests_dir or ()))
    plans = [placeholder_plan(run, site) for run in config.runs(scenario, "render")]
    _notes(scenario.warnings)
    for test in scenario.invalid:
        _notes(test.violations)
    shown = []
    for plan in plans:
        masked = {**plan.environment, **dict.fromkeys(plan.secret_environment, MASK)}
        shown.append({**plan.model_dump(mode="json"), "environment": masked, "command": shell_command(plan)})
    if as_json:
        _print_json({"runs": shown, "invalid": [test.model_dump(mode="json") for test in scenario.invalid]})
    else:
        for document in shown:
            _print_plan(document)
    raise typer.Exit(EXIT_INVALID if scenario.invalid else 0)


@app.command()
def rules(
    rule_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One rule in full; a list of all when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List every validation rule with its severity, versions, reason and source."""
    from nightbridge.rules.catalogue import find_rule, rule_entries

    entries = rule_entries() if rule_id is None else (find_rule(rule_id),)
    if as_json:
        _print_json({"rules": [entry.model_dump(mode="json") for entry in entries]})
    elif rule_id is None:
        _print_table(_rules_table(entries))
        _note("`nightbridge rules ID` shows the fields, versions and source of one")
    else:
        for name, value in entries[0].model_dump().items():
            shown = value if isinstance(value, str) else ", ".join(value)
            print(f"{name.replace('_', ' '):12}{shown or '-'}")


@app.command()
def events(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An event file, or a folder to search for them.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.parquet", help="Write the table there.")] = None,
) -> None:
    """Read TensorBoard event files into a table, up to the first damage of each."""
    from nightbridge.outputs.event_files import metrics_parquet, read_event_files, scalar_table

    if not path.exists():
        raise InvalidInput("no such file or folder", thing=str(path), advice="Name an event file or its folder")
    files, damage = read_event_files(path)
    table = scalar_table(files)
    _notes(damage)
    others = sum((Counter(file.skipped) for file in files), Counter[str]())
    if others:
        _note(f"no scalars, left out: {', '.join(f'{count} {kind}' for kind, count in sorted(others.items()))}")
    if not len(table) and not damage:
        raise InvalidInput("no TensorBoard scalars", thing=str(path), advice="Name a folder with events.out.tfevents.*")
    if out is not None:
        _write_file(out, metrics_parquet(table))
        _note(f"{len(table)} scalars written to {out}")
        return
    print("\t".join(("tag", "points", "first_step", "last_step", "last_value")))
    for tag, rows in table[~table["superseded"]].groupby("tag"):
        points = rows.sort_values("step")
        first, last, value = points["step"].iloc[0], points["step"].iloc[-1], points["value"].iloc[-1]
        print(f"{tag}\t{len(points)}\t{first}\t{last}\t{value:.6g}")


@app.command("run")
def run_scenario(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A test or scenario file.")],
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
    night: Annotated[
        str | None, typer.Option("--night", metavar="ID", help="Night id; the same id finds everything again.")
    ] = None,
    new_attempt: Annotated[
        bool, typer.Option("--new-attempt", help="Open a new attempt for runs whose last one ended.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE.xml", help="Write the verdicts there as JUnit XML.")
    ] = None,
) -> None:
    """Run every test of a file through all stages and compare it with its history.

    The exit code says what the night was: 0 good, 1 regressed, 2 invalid, 3 failed, 4 infrastructure.
    """
    from nightbridge import config
    from nightbridge.nights.records import checked_night, new_night
    from nightbridge.rules import check_scenario

    if junit is not None and not junit.absolute().parent.is_dir():
        # Told before the night begins, not after it.
        raise InvalidInput("its folder does not exist", thing=str(junit), advice="Make it, or name another file")
    tonight = new_night() if night is None else checked_night(night)
    runs = config.runs(check_scenario(config.load(file)), tonight)
    _note(f"night {tonight}")
    from nightbridge.flows import nightly_regression

    try:
        report = nightly_regression(
            file,
            night=tonight,
            system=system,
            cluster=cluster,
            store=store,
            workspace=workspace,
            new_attempt=new_attempt,
        )
    except (KeyboardInterrupt, _Terminated):
        _note(f"interrupted: jobs go on. Go on watching: the same command with --night {tonight}")
        _notes(f"cancel: nightbridge cancel {run.run_key}" for run in runs)
        raise
    if as_json:
        _print_json({**report.model_dump(mode="json"), "exit_code": report.exit_code})
    else:
        _print_verdicts(report.verdicts)
        _print_sweeps(report.sweeps)
        print(f"report: {report.report}")
    if junit is not None:
        _write_junit(junit, report)
    raise typer.Exit(report.exit_code)


@app.command("nights")
def list_nights(
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many nights at most, the newest first.")] = 14,
    as_json: JsonOption = False,
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """List the nights in the store: when each began, and how it ended."""
    from nightbridge.nights.records import find_nights
    from nightbridge.nights.status import nights_table

    site = _site(system, store=store, workspace=workspace)
    found = find_nights(_store(site), limit=limit)
    if as_json:
        _print_json({"nights": [night.model_dump(mode="json") for night in found]})
    elif found:
        _print_table(nights_table(found))
    else:
        _note(f"no night in {_store(site).url} yet")


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[NIGHT|RUN_KEY]", help="A night or a run; the newest night when left out.")
    ] = None,
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show where each run of a night is, or what is known of every attempt of one run."""
    from nightbridge.slurm.attempts import attempts_of

    site = _site(system, cluster, store, workspace)
    if name is not None and attempts_of(name, site.workspace):
        _print_run_status(name, site, as_json)
    else:
        _print_night_status(name, site, as_json)


def _print_night_status(name: str | None, site: "Site", as_json: bool) -> None:
    from nightbridge.nights.records import find_nights
    from nightbridge.nights.status import night_lines, run_statuses
    from nightbridge.slurm.factory import open_cluster

    opened = _store(site)
    found = find_nights(opened, limit=1, night=name)
    if not found:
        raise InvalidInput(
            "no night and no run of this name" if name else "no night yet",
            thing=f"{name or opened.url} in {site.workspace}",
            advice="`nightbridge nights` lists the nights; check --store and --workspace",
        )
    cluster = open_cluster(site.cluster, site.workspace)
    shown = [(night, run_statuses(night.start, opened, cluster)) for night in found]
    if as_json:
        _print_json(
            {
                "nights": [
                    {**night.model_dump(mode="json"), "runs": [run.model_dump(mode="json") for run in runs]}
                    for night, runs in shown
                ]
            }
        )
        return
    for night, runs in shown:
        print("\n".join(night_lines(night, runs)))


def _print_run_status(run_key: str, site: "Site", as_json: bool) -> None:
    from nightbridge.slurm.attempts import jobs_of, read_ended
    from nightbridge.slurm.factory import open_cluster

    opened = open_cluster(site.cluster, site.workspace)
    attempts: list[dict[str, Any]] = []
    for attempt in _attempts(run_key, site):
        ended = read_ended(attempt.attempt_dir)
        attempts.append(
            {
                "attempt": attempt.name,
                "folder": str(attempt.attempt_dir),
                "jobs": [job.model_dump(mode="json") for job in jobs_of(attempt, opened)],
                "outcome": ended.outcome if ended else None,
                "reason": ended.outcome_reason if ended else "",
            }
        )
    if as_json:
        _print_json({"run_key": run_key, "attempts": attempts})
        return
    for shown in attempts:
        jobs = ", ".join(f"job {job['job_id']} {job['state']} {job['reason']}".rstrip() for job in shown["jobs"])
        print(f"{shown['attempt']}: {jobs or 'no job'}; {shown['outcome'] or 'not ended'} {shown['reason']}".rstrip())


@app.command()
def logs(run_key: RunKeyArgument, system: SystemOption = None, workspace: WorkspaceOption = None) -> None:
    """Print the log of a run's newest job, or the launcher's where no job has written one."""
    from nightbridge.slurm.attempt_files import read_submission

    attempt = _attempts(run_key, _site(system, workspace=workspace))[-1]
    submission = read_submission(attempt.attempt_dir)
    written = sorted(submission.experiment_dir.glob("log*.out")) if submission else []
    launcher = attempt.attempt_dir / "launcher.log"
    found = written or ([launcher] if launcher.exists() else [])
    if not found:
        _note(f"{attempt.name} has no log yet")
    for path in found:
        _note(f"==> {path}")
        with path.open("rb") as stream:
            shutil.copyfileobj(stream, sys.stdout.buffer)


@app.command()
def cancel(
    run_key: RunKeyArgument,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Cancel the live jobs of a run."""
    from nightbridge.slurm.attempts import cancel_jobs
    from nightbridge.slurm.factory import open_cluster

    site = _site(system, cluster, workspace=workspace)
    _attempts(run_key, site)
    cancelled = cancel_jobs(run_key, site.workspace, open_cluster(site.cluster, site.workspace))
    print("\n".join(f"cancelled job {job_id}" for job_id in cancelled) or "no job of this run is live")


@app.command()
def history(
    test_id: Annotated[str, typer.Argument(metavar="TEST_ID", help="A test's id, as scenarios and reports show it.")],
    rebuild: Annotated[bool, typer.Option("--rebuild", help="First write the rows of all stored runs again.")] = False,
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Name of the cluster; any when left out.")] = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Show the trend of a test, and since when a metric has another level."""
    from nightbridge.gate.suspects import with_commits
    from nightbridge.gate.trend import trend_lines, trend_table
    from nightbridge.report.queries import history_of
    from nightbridge.repos.commits import known_commits_between

    site = _site(system, store=store, workspace=workspace)
    opened = _store(site)
    if rebuild:
        from nightbridge.history.reading import rebuild_history

        _notes(rebuild_history(opened, test_id).damaged)
    found = history_of(opened, test_id, cluster)
    found = found.model_copy(update={"trends": with_commits(found.trends, known_commits_between(site))})
    if as_json:
        _print_json(found.model_dump(mode="json"))
        return
    _print_table(trend_table(found.trends, found.rows))
    for line in trend_lines(found.trends):
        print(line)


@app.command()
def compare(
    run_key: RunKeyArgument,
    baseline: Annotated[str | None, typer.Argument(metavar="BASELINE", help="Another run key.")] = None,
    as_json: JsonOption = False,
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Judge a stored run again: against the good runs before it, or against one other run."""
    from nightbridge.report.queries import compare_stored

    site = _site(system, store=store, workspace=workspace)
    verdict = compare_stored(_store(site), run_key, baseline, site.contract)
    if as_json:
        _print_json({**verdict.model_dump(mode="json"), "exit_code": verdict.exit_code})
    else:
        _print_verdicts([verdict])
    raise typer.Exit(verdict.exit_code)


@app.command()
def accept(
    target: Annotated[str, typer.Argument(metavar="RUN|SERIES", help="A run key, or a series.")],
    why: Annotated[str, typer.Option("--why", help="The reason, as verdicts will show it.")],
    kind: Annotated[str, typer.Option("--as", help="acknowledged, fixed or baseline.")] = "acknowledged",
    who: Annotated[str, typer.Option("--who", help="Who decides; the user who is logged in when left out.")] = "",
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Only this one; may be repeated.")] = None,
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Name of the cluster, for a series; the site's when left out.")
    ] = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Say about a worse level that it is known, fixed or the new baseline, so that it alarms no more.

    Nothing is deleted: verdicts and history show the decision with its reason.
    """
    import getpass

    from nightbridge.gate.accept import accept as decide
    from nightbridge.gate.accept import checked_kind, checked_metrics

    site = _site(system, store=store, workspace=workspace)
    decision = decide(
        _store(site),
        target,
        checked_kind(kind),
        who=who or getpass.getuser(),
        why=why,
        metrics=checked_metrics(metric or ()),
        cluster=cluster or site.cluster.name,
    )
    if as_json:
        _print_json(decision.model_dump(mode="json"))
    else:
        print(f"{decision.series}: {decision.text}")


@app.command()
def parity(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The run that is compared with.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is compared.")],
    gate: Annotated[
        Literal["numerics", "convergence", "iterations"],
        typer.Option("--gate", help="What decides: every bit, the course of the loss, or each iteration's loss."),
    ] = "convergence",
    first: Annotated[
        float | None,
        typer.Option("--first", min=0, help="How far the first iteration may be off; as reference_rules has it."),
    ] = None,
    later: Annotated[
        float | None, typer.Option("--later", min=0, help="How far later ones may be off; the same.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="The last iteration that counts.")] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE.html", help="Draw both runs' curves over each other there.")
    ] = None,
    as_json: JsonOption = False,
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Say whether two stored runs compute the same, or converge alike, step by step."""
    from nightbridge.goldens.parity import GATE_WORDS
    from nightbridge.models import ReferencePolicy
    from nightbridge.report.queries import parity_page_stored, parity_stored

    kept = _store(_site(system, store=store, workspace=workspace))
    given = {"first": first, "later": later, "steps": steps}
    policy = ReferencePolicy().model_copy(update={name: limit for name, limit in given.items() if limit is not None})
    found = parity_stored(kept, run_a, run_b, policy)
    faults = found.faults_of(gate)
    if page is not None:
        _write_file(page, parity_page_stored(kept, found, gate).encode())
    if as_json:
        _print_json({**found.model_dump(mode="json"), "gate": gate, "passed": not faults})
    else:
        for fault in faults:
            print(fault)
        print("compute the same, bit for bit" if found.same_numerics else GATE_WORDS[gate][bool(faults)])
    raise typer.Exit(1 if faults else 0)


@app.command()
def bisect(
    test_id: Annotated[str, typer.Argument(metavar="TEST_ID", help="A test's id, as scenarios and reports show it.")],
    metric: Annotated[
        str | None, typer.Option("--metric", help="Which metric; the one that became worse last.")
    ] = None,
    repository: Annotated[
        str | None, typer.Option("--repository", help="megatron-bridge or nemo-run; the one whose commit changed.")
    ] = None,
    good: Annotated[str | None, typer.Option("--good", metavar="COMMIT", help="Begin after it; from history.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", metavar="COMMIT", help="End with it; from history.")] = None,
    bisect_id: Annotated[str | None, typer.Option("--id", help="Go on with this bisect.")] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="How probable the commit must be.")] = 0.99,
    most_runs: Annotated[int, typer.Option("--most-runs", min=1, help="Runs after which it ends undecided.")] = 100,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="Runs at once; as many as the cluster has room for.")
    ] = None,
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Find the commit that made a test worse, by running commits between a good and a bad night.

    The same command goes on with a bisect that was interrupted. Exit code 0 when the commit is named, 1 when not.
    """
    from nightbridge.bisect.plan import Repository
    from nightbridge.bisect.result import result_lines
    from nightbridge.flows import bisect_regression

    known: dict[str, Repository] = {"megatron-bridge": "megatron_bridge", "nemo-run": "nemo_run"}
    if repository is not None and repository.lower() not in known:
        raise InvalidInput("no such repository", thing=repository, advice="Use megatron-bridge or nemo-run")
    result = bisect_regression(
        test_id,
        metric=metric,
        repository=known[repository.lower()] if repository else None,
        good=good,
        bad=bad,
        bisect_id=bisect_id,
        confidence=confidence,
        most_runs=most_runs,
        at_once=at_once,
        system=system,
        cluster=cluster,
        store=store,
        workspace=workspace,
    )
    if as_json:
        culprits = [commit.model_dump(mode="json") for commit in result.culprits]
        _print_json({**result.model_dump(mode="json"), "culprits": culprits, "gpu_hours": result.gpu_hours})
    else:
        print("\n".join(result_lines(result)))
    raise typer.Exit(0 if result.culprits else 1)


@app.command()
def demo(
    workspace: WorkspaceOption = None,
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Only make the launcher's environment and the practice repositories.")
    ] = False,
) -> None:
    """Run the whole pipeline on this machine, from nothing: two tests, several nights, one with a slower commit."""
    folder = Path(workspace or ".nightbridge").absolute()
    # Prefect reads its settings once, when it is imported: the demo has its own server, database and silence.
    home = folder / "demo-prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_HOME=str(home),
        PREFECT_LOGGING_LEVEL="ERROR",
        # On a slow machine the server meets a locked database, says so at length, and tries again.
        PREFECT_LOGGING_SERVER_LEVEL="CRITICAL",
    )
    from examples.practice import demo as nights

    if prepare_only:
        repositories = nights.prepare(folder)
        _note(f"launcher environment and practice repositories are ready: {repositories.bridge_url}")
        return
    _note(f"{len(nights.NIGHTS)} nights of two tests, about a minute in all")

    def tell(night: "nights.DemoNight", report: "NightReport") -> None:
        _note(f"night {report.night}: {night.subject}")
        _print_verdicts(report.verdicts)

    reports = nights.run_demo(folder, tell)
    print(f"report of the night that slowed down: {nights.slow_night(reports).report}")
    print(f"report of the last night: {reports[-1].report}")


@app.command()
def verify(
    run_key: RunKeyArgument,
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Check every stored object of a run against its manifest."""
    from nightbridge.harvest.manifest import last_attempt
    from nightbridge.harvest.restore import verify_run

    opened = _store(_site(system, store=store, workspace=workspace))
    prefix = last_attempt(opened, run_key)
    problems = verify_run(opened, prefix, _show_progress)
    if problems:
        from nightbridge.errors import DamagedData

        raise DamagedData("\n  ".join(problems), thing=opened.url_of(prefix), advice="Harvest the run again")
    print(f"{opened.url_of(prefix)}: every object is there and whole")


@app.command()
def fetch(
    run_key: RunKeyArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to restore the run into.")],
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Bring a stored run back, every byte verified."""
    from nightbridge.harvest.manifest import last_attempt
    from nightbridge.harvest.restore import fetch_run

    opened = _store(_site(system, store=store, workspace=workspace))
    manifest = fetch_run(opened, last_attempt(opened, run_key), dest, _show_progress)
    print(f"{dest}: {len(manifest.files)} files of {run_key}, attempt {manifest.attempt}")


@app.command()
def prune(
    days: Annotated[float, typer.Option("--days", min=1, help="Remove what was not wanted for so many days.")] = 30,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Of the rest keep so many, per repository.")] = 20,
    max_gb: Annotated[float | None, typer.Option("--max-gb", min=0, help="Largest size of all images.")] = None,
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
    system: SystemOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """List old checkouts, images and stored runs, and remove them with --yes; never what is still needed.

    Stored runs go only beyond the limits of the site's [store.retention], or of --store-days, --store-nights and
    --store-gb; never one that a baseline, the verdict of a run that stays, or an accepted decision refers to.
    """
    from nightbridge.prune import Policy, find_old_checkouts, find_old_images, remove_checkouts, remove_images

    site = _site(system, store=store, workspace=workspace)
    policy = Policy(days=days, keep=keep, max_bytes=None if max_gb is None else int(max_gb * 1e9))
    checkouts = find_old_checkouts(site.workspace, policy)
    images = find_old_images(site.workspace, site.images_dir, policy, site.image_import)
    if yes:
        checkouts = remove_checkouts(site.workspace, checkouts)
        images = remove_images(site.workspace, site.images_dir, images)
    limits = {"days": store_days, "nights": store_nights, "max_gb": store_gb}
    runs = _prune_store(site, {name: limit for name, limit in limits.items() if limit is not None}, yes)
    removals = [*checkouts, *images]
    if as_json:
        shown: dict[str, Sequence[Any]] = {"removals": removals, "runs": runs}
        documents = {name: [one.model_dump(mode="json") for one in found] for name, found in shown.items()}
        _print_json({"removed": yes, **documents})
        return
    for removal in removals:
        print(f"{removal.path}  {removal.size / 1e6:.0f} MB  {removal.last_used:%Y-%m-%d}  {removal.reason}")
    for old in runs:
        print(f"{old.url}  {old.run.size / 1e6:.0f} MB  {old.run.written_at:%Y-%m-%d}  {old.reason}")
    size = sum(removal.size for removal in removals) + sum(old.run.size for old in runs)
    total = f"{len(removals)} checkouts and images and {len(runs)} stored runs, {size / 1e9:.1f} GB"
    _note(f"removed {total}" if yes else f"would remove {total}; --yes removes them")


@app.command()
def watchdog(
    by: Annotated[str, typer.Option("--by", metavar="HH:MM", help="When every verdict has to be there.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="Scenarios to expect; all that had a scheduled night lately when left out."
        ),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="TZ", help="Zone of --by; this machine's own when left out.")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How far back nights say which ones to expect.")] = 7,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing when every verdict is there.")] = False,
    send_test: Annotated[
        bool, typer.Option("--send-test", help="Only send a test notice, as [notify] of the site says.")
    ] = False,
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Say which test has no verdict by a time of the morning, and why; alarm by mail and webhook ([notify]).

    It reads the store and asks Slurm, and needs no Prefect server. Each scenario's nights of the 24 hours before --by
    count: today's --by, or yesterday's when that is more than five minutes ahead. A bad verdict is listed and is no
    alarm. Exit code 0 when every verdict is there, 4 when one is missing or cannot be looked up or told, 2 for invalid
    input.
    """
    from nightbridge.nights.prefect_api import configured_server
    from nightbridge.nights.watchdog import look, notice_of, question, trial_notice, watch_lines

    asked = question(by, timezone=timezone, files=files or (), days=days)
    site = _site(system, cluster, store, workspace)
    if send_test:
        if not _send(trial_notice(), site):
            raise InvalidInput("tells nobody", thing=system or "the site", advice="Give it a [notify] table")
        return
    watch = look(asked, site, lambda: _store(site), configured_server())
    if as_json:
        _print_json({**watch.model_dump(mode="json"), "exit_code": watch.exit_code})
    elif watch.exit_code or not quiet:
        print("\n".join(watch_lines(watch)))
    raise typer.Exit(_alarm(notice_of(watch), site, watch.exit_code) if watch.exit_code else 0)


def _alarm(notice: "Notice", site: "Site", code: int) -> int:
    """Tell people what was seen; return the exit code, which an alarm that reaches nobody makes no milder."""
    try:
        if not _send(notice, site):
            _note("nobody was told: the site has no [notify]")
    except NightbridgeError as error:
        return _failed(error, EXIT_INTERNAL)
    return code


def _send(notice: "Notice", site: "Site") -> bool:
    """Tell people in every way that the site has; return whether it has any."""
    from nightbridge.notify import notify

    sent = notify(notice, site.notify, _block_values(site.notify.smtp_password, site.notify.webhook))
    _notes(f"sent: {way}" for way in sent)
    return bool(sent)


@app.command()
def doctor(
    as_json: JsonOption = False,
    system: SystemOption = None,
    cluster: ClusterOption = None,
    store: StoreOption = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Try each thing that a night needs here: workspace, git, launcher environment, containers, cluster, store.

    Nothing is submitted, and nothing that is written stays. Exits with 4 when something is not as a night needs it.
    """
    from nightbridge.cli.doctor import examine

    site = _site(system, cluster, store, workspace)
    findings = []
    for finding in examine(site, lambda: _store(site)):
        findings.append(finding)
        if not as_json:
            advice = f". {finding.advice}" if finding.advice else ""
            print(f"{'✓' if finding.healthy else '✗'} {finding.subject:22}{finding.what}{advice}", flush=True)
    healthy = all(finding.healthy for finding in findings)
    if as_json:
        _print_json({"healthy": healthy, "findings": [finding.model_dump(mode="json") for finding in findings]})
    raise typer.Exit(0 if healthy else EXIT_INTERNAL)


def _prune_store(site: "Site", limits: Mapping[str, float], yes: bool) -> "list[RunRemoval]":
    """The stored runs beyond the limits: those that were removed, or those that would be."""
    from nightbridge.harvest.retention import find_old_runs, remove_runs
    from nightbridge.models import RetentionPolicy

    policy = site.store_settings.retention.model_copy(update=dict(limits))
    if policy == RetentionPolicy():
        return []  # the store is not even looked at
    opened = _store(site)
    runs = find_old_runs(opened, policy)
    return remove_runs(opened, runs, _show_progress) if yes else runs


# --- the site that a command works with ------------------------------------------------------------------------------


def _site(
    system: str | None = None, cluster: str | None = None, store: str | None = None, workspace: str | None = None
) -> "Site":
    """The site from what the person named; Prefect is started only where a name can be nothing but a block's."""
    from nightbridge.config.sites import plain_site

    plain = plain_site(system, cluster=cluster, store=store, workspace=workspace)
    if plain is None:
        from nightbridge.flows.api import load_site
        from nightbridge.flows.server import reach_server

        reach_server()
        found: Site = load_site(system, cluster=cluster, store=store, workspace=workspace)
        return found
    site, warnings = plain
    _notes(warnings)
    return site


def _attempts(run_key: str, site: "Site") -> "tuple[AttemptContext, ...]":
    from nightbridge.slurm.attempts import attempts_of

    attempts = attempts_of(run_key, site.workspace)
    if not attempts:
        raise InvalidInput(
            "no run of this key", thing=f"{run_key} in {site.workspace}", advice="Check the key and --workspace"
        )
    return attempts


def _limits(site: "Site") -> "ClusterLimits":
    from nightbridge.slurm.factory import open_cluster

    return open_cluster(site.cluster, site.workspace).limits()


def _store(site: "Site") -> "ObjectStore":
    from nightbridge.store.factory import open_store

    settings = site.store_settings
    return open_store(settings, _block_values(settings.access_key, settings.secret_key))


def _block_values(*secrets: "SecretRef | None") -> "Callable[[str], str] | None":
    """What reads secrets out of Prefect's blocks; Prefect is started only where one is kept there."""
    if not any(secret and secret.source == "block" for secret in secrets):
        return None
    from nightbridge.flows.api import block_value
    from nightbridge.flows.server import reach_server

    reach_server()
    read: Callable[[str], str] = block_value
    return read


# --- what validate finds ---------------------------------------------------------------------------------------------


def _no_code(test: "TestDefinition") -> "Checkout | None":
    """Without --pinned nothing is fetched."""
    return None


def _code_of(site: "Site") -> "Callable[[TestDefinition], Checkout | None]":
    """What checks out the code of a test, for this one call: a branch is asked for anew."""
    from nightbridge.nights.records import new_night
    from nightbridge.repos.clone import make_code
    from nightbridge.repos.remotes import git_logins
    from nightbridge.secrets import resolve_secret

    night, named = new_night(), site.git_credentials
    lines = resolve_secret(named, _block_values(named)) if named else ""

    def code(test: "TestDefinition") -> "Checkout":
        with git_logins(lines):
            return make_code(test, site, night)

    return code


def _validation(
    file: Path,
    tests_dirs: list[Path],
    limits: "ClusterLimits | None",
    code: "Callable[[TestDefinition], Checkout | None]",
) -> dict[str, Any]:
    """Everything that is to say about one file, as the JSON document has it."""
    from nightbridge import config

    try:
        scenario = config.load(file, tests_dirs=tests_dirs)
    except InvalidInput as error:
        findings = [_finding(violation) for violation in error.violations]
        document = {"file": str(file), "valid": False, "error": NightbridgeError.__str__(error), "findings": findings}
        return {**document, "scenario": None, "tests": [], "warnings": []}
    tests = _test_reports(scenario, limits, code)
    return {
        "file": str(file),
        "valid": all(test["valid"] for test in tests),
        "error": None,
        "findings": [],
        "scenario": scenario.name,
        "tests": tests,
        "warnings": list(scenario.warnings),
    }


def _container_validation(file: Path, gpus: int | None, overrides: list[str]) -> dict[str, Any]:
    """What is to say about a ConfigContainer, in the same form."""
    from nightbridge.launch.config_container import read_container, with_overrides
    from nightbridge.rules import errors_of
    from nightbridge.rules.config_container import check_container

    document: dict[str, Any] = {"file": str(file), "error": None, "findings": [], "scenario": None, "warnings": []}
    try:
        found = check_container(with_overrides(read_container(file), overrides), gpus)
    except InvalidInput as error:
        findings = [_finding(violation) for violation in error.violations]
        message = NightbridgeError.__str__(error)
        return {**document, "valid": False, "error": message, "findings": findings, "tests": []}
    test = {
        "id": "ConfigContainer",
        "source": str(file),
        "valid": not errors_of(found),
        "findings": [violation.model_dump(mode="json") for violation in found],
    }
    return {**document, "valid": test["valid"], "tests": [test]}


def _test_reports(
    scenario: "Scenario", limits: "ClusterLimits | None", code: "Callable[[TestDefinition], Checkout | None]"
) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = [
        {
            "id": invalid.id,
            "source": invalid.source,
            "valid": False,
            "findings": [_finding(violation) for violation in invalid.violations],
        }
        for invalid in scenario.invalid
    ]
    for test in scenario.tests:
        findings = _test_findings(test, limits, code)
        valid = all(finding["severity"] != "error" for finding in findings)
        reports.append({"id": test.id, "source": test.source, "valid": valid, "findings": findings})
    return reports


def _test_findings(
    test: "TestDefinition", limits: "ClusterLimits | None", code: "Callable[[TestDefinition], Checkout | None]"
) -> list[dict[str, Any]]:
    """What the rules find in one test; a pin that does not exist is one finding more."""
    from nightbridge.rules import check_test

    try:
        found, unpinned = check_test(test, limits, code(test)), []
    except InvalidInput as error:
        found = check_test(test, limits)
        unpinned = [{**_finding(str(error)), "rule": "pinned-code", "fields": ["git_repos"]}]
    return [*unpinned, *(violation.model_dump(mode="json") for violation in found)]


def _finding(message: str) -> dict[str, Any]:
    """A violation that was found while reading, in the form of those that a rule finds."""
    return {"rule": "configuration", "severity": "error", "fields": [], "message": message}


def _print_validation(report: Mapping[str, Any]) -> None:
    _notes(report["warnings"])
    if report["error"]:
        print(report["error"])
    _print_findings(report["findings"])
    for test in report["tests"]:
        print(f"{test['source']}: {test['id']}: {'ok' if test['valid'] else 'INVALID'}")
        _print_findings(test["findings"])


def _print_findings(findings: Sequence[Mapping[str, Any]]) -> None:
    """A table for people; one line for each where something else reads them."""
    if findings and sys.stdout.isatty():
        _print_table(_findings_table(findings))
        return
    for finding in findings:
        print(f"  {finding['severity']} [{finding['rule']}] {finding['message']}")


def _findings_table(findings: Iterable[Mapping[str, Any]]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("severity", "rule", "what, and the way out", box=box.SIMPLE_HEAD, pad_edge=False)
    for finding in findings:
        # What stands in a file is Text, never rich's markup.
        style = "bold red" if finding["severity"] == "error" else "yellow"
        table.add_row(Text(finding["severity"], style), Text(finding["rule"]), Text(finding["message"]))
    return table


def _rules_table(entries: "Iterable[RuleEntry]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table("rule", "severity", "reason", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for entry in entries:
        table.add_row(entry.id, entry.severity, entry.reason)
    return table


def _print_plan(plan: Mapping[str, Any]) -> None:
    print(f"# {plan['run_key']}: {plan['nodes']} node(s) x {plan['tasks_per_node']} task(s)")
    for name, value in plan["environment"].items():
        print(f"export {name}={value}")
    print(f"cd {plan['cwd']}")
    print(plan["command"])
    if plan["sbatch_args"]:
        print(f"# sbatch options: {' '.join(plan['sbatch_args'])}")
    if plan["batch_script"] is not None:
        print(f"# {plan['argv'][-1]}:")
        print(plan["batch_script"])
    _notes(f"{plan['run_key']}: {warning}" for warning in plan["warnings"])


# --- output ----------------------------------------------------------------------------------------------------------


def _print_json(document: object) -> None:
    """Print JSON that every parser takes: what is infinite or not a number is null, which Python's own would not do."""
    from pydantic_core import to_json

    print(to_json(document, indent=2, inf_nan_mode="null", fallback=str).decode())


def _print_verdicts(verdicts: "Sequence[Verdict]") -> None:
    from nightbridge.report.tables import reason_lines, verdict_table

    _print_table(verdict_table(verdicts))
    for line in reason_lines(verdicts):
        print(line)


def _write_junit(path: Path, report: "NightReport") -> None:
    """Write a night's verdicts for a CI system; the night itself is over and kept, whatever becomes of this file."""
    from nightbridge.models import utc_now
    from nightbridge.report.junit import junit_xml

    _write_file(
        path, junit_xml(report.scenario, report.night, report.verdicts, report=report.report, written_at=utc_now())
    )


def _write_file(path: Path, data: bytes) -> None:
    """Write what a person asked for, to where they asked for it."""
    from nightbridge.files import write_atomically

    try:
        write_atomically(path, data)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise InvalidInput(reason, thing=str(path), advice="Name a file that can be written") from error


def _print_sweeps(sweeps: "Sequence[SweepResult]") -> None:
    from nightbridge.report.sweeps import best_line, sweep_table

    for sweep in sweeps:
        _print_table(sweep_table(sweep))
        print(f"{sweep.test_id}: {best_line(sweep)}")
        if sweep.note:
            print(f"{sweep.test_id}: {sweep.note}")


def _print_table(table: "Table") -> None:
    from rich.console import Console

    Console().print(table)


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _notes(lines: Iterable[str]) -> None:
    for line in lines:
        _note(line)


def _show_progress(progress: "Progress") -> None:
    if sys.stderr.isatty():
        end = "\n" if progress.files_done == progress.files_total else "\r"
        # Cleared first: the line before it may have been longer.
        print(f"\x1b[2K{progress}", end=end, file=sys.stderr, flush=True)


# --- entry point -----------------------------------------------------------------------------------------------------


class _Terminated(BaseException):
    """SIGTERM was received."""


def main() -> NoReturn:
    """Run the command line; every error becomes one message on stderr and an exit code of DESIGN.md."""
    # Prefect calls this handler again after its own; without one the process would die before it says anything.
    signal.signal(signal.SIGTERM, _terminate)
    end_after_signals()
    sys.exit(run(sys.argv[1:]))


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise _Terminated


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    # Prefect reads its settings once, when it is imported: its telemetry, and that of its server, stays off.
    os.environ.update(PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")
    try:
        result = app(args=arguments, standalone_mode=False)
    except InvalidInput as error:
        return _failed(error, EXIT_INVALID)
    except NightbridgeError as error:
        return _failed(error, EXIT_INTERNAL)
    except BrokenPipeError:
        sys.stdout = None  # nobody reads any more, and nothing may be flushed at exit
        return 0
    except OSError as error:
        return _failed(_refused_by_the_system(error), EXIT_INTERNAL)
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except _Terminated:
        return _failed("terminated; a job that was submitted goes on", EXIT_TERMINATED)
    except Exception as error:
        return _usage_or_defect(error)
    if result == EXIT_INTERRUPTED:
        return _failed("interrupted; a job that was submitted goes on", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def _refused_by_the_system(error: OSError) -> str:
    """A file or folder of the person's that this machine does not let us read or write."""
    reason = error.strerror or f"{type(error).__name__}: {error}"
    advice = "Check the path, and this user's rights to it"
    return f"{error.filename}: {reason}. {advice}" if error.filename else reason


def _usage_or_defect(error: Exception) -> int:
    """Typer's own errors have a message for the person; anything else is a defect of ours, told in one line."""
    if hasattr(error, "format_message"):
        message = error.format_message().rstrip(".")
        return _failed(f"{message}. See nightbridge --help." if message else "no command given", EXIT_INVALID)
    return _failed(f"internal error: {type(error).__name__}: {error}", EXIT_INTERNAL)


def _failed(message: object, code: int) -> int:
    _note(f"nightbridge: {message}")
    return code


if __name__ == "__main__":
    main()
