"""What comes before a job: stages 1 to 3, clone, container and validate.

Before the first of them, `prepare` checks everything that needs no checkout, so that nothing is fetched in vain. A run
then gets both repositories at exact commits with the launcher's environment, and an image or the declared absence of
one, all verified. Last, the rules are checked against the pinned code, and what will be started is fixed.
"""

from collections.abc import Sequence
from pathlib import Path

from prefect.logging import get_run_logger

from nightbridge.config.scenarios import sweeps_nodes
from nightbridge.errors import InvalidInput, NightbridgeError, StatusUnknown, TransientError
from nightbridge.files import open_workspace
from nightbridge.gate.paired_trial import CORE_FOLDER, ProposedChange, trial_arm
from nightbridge.history.reading import last_good_dump, series_of
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import Importer, current_image, image_file, pull_image, recorded_image
from nightbridge.images.node_import import NodeImporter
from nightbridge.launch.launch_plan import check_workspace, make_launch_plan
from nightbridge.models import Checkout, ClusterLimits, Image, Job, LaunchPlan, RunSpec, Scenario, Site, Violation
from nightbridge.nights.records import read_verdict
from nightbridge.repos.clone import current_commits, make_checkout
from nightbridge.rules import check_dumped, check_test, errors_of
from nightbridge.slurm.attempt_files import last_attempt, may_have_job
from nightbridge.slurm.attempts import attempts_of, without_failed_nodes
from nightbridge.slurm.factory import cluster_of
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.tasks.context import run_log
from nightbridge.tasks.prefect_calls import PrefectAway, artifact_key, show_table
from nightbridge.tasks.site_access import image_login, node_runner, site_logins, store_of
from nightbridge.tasks.stage import never_reused, stage


def show_violations(scenario: Scenario, cluster: str) -> None:
    """Show everything that is wrong or odd in a night's tests, all of them at once, as an artifact of the flow run."""
    rows = [
        {"test": test.id, "severity": "error", "what": violation}
        for test in scenario.invalid
        for violation in test.violations
    ]
    rows += [{"test": "", "severity": "warning", "what": warning} for warning in scenario.warnings]
    key = artifact_key("violations", scenario.name, cluster)
    show_table("the violations", rows, key=key, description=f"{scenario.name}: {len(rows)} violations")


@stage("place", waits_for=(TransientError,))
def check_place(site: Site) -> None:
    """Check what every run of a night needs, and its report: that the workspace and the store can be written."""
    _check_place(site)


def node_limits(tests: Scenario, site: Site) -> ClusterLimits | None:
    """The cluster's limits, queried only where a test sweeps over its nodes: their GPUs follow from them."""
    return cluster_of(site).limits() if sweeps_nodes(tests) else None


@stage("prepare", waits_for=(TransientError,))
def prepare(run: RunSpec, site: Site) -> ClusterLimits:
    """Check all that needs no checkout: workspace and store, and every rule against the cluster's limits.

    A run that was started before may have a job by now: it goes on, whatever the cluster allows today.

    Returns:
        The limits.

    Raises:
        InvalidInput: The run breaks a rule, or has ended and this workspace does not know its job.
    """
    if run.test.has_launcher:
        check_workspace(site.workspace)
    _check_place(site)
    _refuse_ended(run, site)
    limits = cluster_of(site).limits()
    _refuse_errors(run, check_test(run.test, limits), _last_attempt_dir(run, site))
    return limits


def _last_attempt_dir(run: RunSpec, site: Site) -> Path:
    run_dir = site.workspace / "runs" / run.run_key
    return run_dir / f"a{last_attempt(run_dir)}"


@stage("clone", waits_for=(PrefectAway,))
def clone(run: RunSpec, site: Site) -> Checkout:
    """Pin Megatron-Bridge and NeMo-Run for this night and make their checkouts."""
    with site_logins(site):
        checkout = make_checkout(run, site)
    log = get_run_logger()
    for repository in checkout.repositories:
        log.info("%s at %s (%s) %s", repository.url, repository.commit[:12], repository.ref, repository.subject)
    return checkout


@stage("change", waits_for=(PrefectAway,), key=never_reused)
def resolve_change(change: ProposedChange, control: RunSpec, site: Site) -> dict[str, str]:
    """What a change's refs and its tag mean now: commits by folder, and what the image is. Nothing is pinned.

    Raises:
        InvalidInput: There is no such ref or image.
    """
    open_workspace(site.workspace)
    new = trial_arm(control, change, 1)
    test = new.test
    named = {".": change.bridge, CORE_FOLDER: change.core}
    found = {}
    if any(named.values()):
        core = {folder: ref for folder, ref in test.megatron_bridge.submodules.items() if named.get(folder)}
        with site_logins(site):
            commits = current_commits(test.megatron_bridge.model_copy(update={"submodules": core}), site)
        found = {folder: commit for folder, commit in commits.items() if named[folder]}
    if change.image:
        found["image"] = current_image(new, lambda: _importer(site))
    get_run_logger().info("%s: %s", change, ", ".join(f"{name} {what}" for name, what in found.items()))
    return found


@stage("container", waits_for=(JobNotAccepted, StatusUnknown, PrefectAway))
def container(run: RunSpec, site: Site) -> Image:
    """Pull and verify the run's container image; a job that was submitted with a file goes on without it."""
    try:
        image = pull_image(run, site, lambda: _importer(site))
    except InvalidInput as error:
        known = recorded_image(run, site) if may_have_job(_last_attempt_dir(run, site)) else None
        if known is None:
            raise
        image = known
        run_log().warning("it was submitted before, so the run continues: %s", error)
    run_log().info("container: %s", image.path or "none, as configured")
    return image


def _importer(site: Site) -> Importer:
    """What imports where the site wants it, with the site's login. Made only when there is something to import."""
    settings, login = site.image_import, image_login(site)
    if settings.on == "host":
        return find_enroot(settings, login)
    advice = 'Set on = "host" in [image_import], or import_on of the Image Cache block'
    srun = node_runner(site, settings.srun_args, "images are to be imported", advice)
    return NodeImporter(srun, settings, login)


@stage("validate", waits_for=(TransientError,))
def validate(
    run: RunSpec,
    checkout: Checkout,
    image: Image,
    site: Site,
    limits: ClusterLimits,
    attempt: int,
    attempt_dir: Path,
    earlier: tuple[Job, ...] = (),
) -> LaunchPlan:
    """Check the run against the code that it pins, and plan its launch.

    Args:
        run: The concrete configuration.
        checkout: The pinned code.
        image: The container's image.
        site: Where it runs.
        limits: What the cluster allows.
        attempt: Number of the attempt.
        attempt_dir: Its folder.
        earlier: The ended jobs of earlier attempts: nodes that failed are left out.

    Raises:
        InvalidInput: The run breaks a rule, and the attempt has no job yet.
    """
    violations = (*check_test(run.test, limits, checkout), *_against_last_good(run, site))
    show_table(
        f"the violations of {run.test.id}",
        [violation.model_dump(mode="json") for violation in violations],
        key=artifact_key("violations", run.scenario, site.cluster.name, run.test.id),
        description=f"Violations of {run.test.id}, against the pinned code and the cluster's limits",
    )
    _refuse_errors(run, violations, attempt_dir)
    if image.path is not None and not may_have_job(attempt_dir):
        image_file(image.path)  # it may have been removed since an earlier attempt
    plan = make_launch_plan(run, checkout, image, limits, site, attempt, attempt_dir)
    plan = without_failed_nodes(plan, earlier, limits)
    log = get_run_logger()
    for warning in (*violations, *plan.warnings):
        log.warning("%s", warning)
    log.info("%d node(s) x %d task(s): %s", plan.nodes, plan.tasks_per_node, " ".join(plan.argv))
    return plan


def _against_last_good(run: RunSpec, site: Site) -> tuple[Violation, ...]:
    """What tonight's values break in the configuration that the last good run of the series dumped.

    Without that dump, or while it cannot be read, the run is checked by the other rules alone.
    """
    log = get_run_logger()
    if not run.test.has_launcher:
        return ()
    try:
        store, cluster = store_of(site), site.cluster.name
        dumped = last_good_dump(store, cluster, series_of(store, run, cluster), run.night)
    except NightbridgeError as error:
        log.warning("not checked against the configuration of the last good run: %s", error)
        return ()
    if dumped is None:
        return ()
    violations, differences = check_dumped(dumped, run.test)
    for found in differences:
        log.info("differs from the last good run: %s = %r, was %r", found.path, found.after, found.before)
    return violations


def _refuse_errors(run: RunSpec, violations: Sequence[Violation], attempt_dir: Path) -> None:
    """Refuse a run that breaks rules; one whose attempt may have a job is followed to its end all the same."""
    found = [str(violation) for violation in errors_of(violations)]
    if found and not may_have_job(attempt_dir):
        raise InvalidInput(f"{len(found)} rule(s) broken", subject=run.test.id, violations=found)
    for violation in found:
        run_log().warning("it was submitted before, so the run continues: %s", violation)


def _refuse_ended(run: RunSpec, site: Site) -> None:
    """Refuse a run that has its verdict, and left nothing in this workspace: its job would be submitted again."""
    if attempts_of(run.run_key, site.workspace):
        return
    ended = read_verdict(store_of(site), run.run_key, run.night)
    if ended is not None and ended.job_id is not None:
        raise InvalidInput(
            f"ended as job {ended.job_id}, and would be submitted again: what was kept of it is not in"
            f" {site.workspace / 'runs'}",
            subject=run.run_key,
            advice="Give it another night id, or none; its verdict and results are kept in the store",
        )


def _check_place(site: Site) -> None:
    store = store_of(site)
    open_workspace(site.workspace)
    store.check_writable()
