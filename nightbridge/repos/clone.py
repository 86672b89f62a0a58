"""The clone stage: both repositories at the night's commits, and the launcher's environment."""

from datetime import datetime

from nightbridge.errors import InvalidInput
from nightbridge.models import Checkout, GitRepo, PinnedRepository, RunSpec, Site, TestDefinition
from nightbridge.repos.checkouts import check_out, find_changes, find_replaced, find_submodules
from nightbridge.repos.commits import Find, pinned
from nightbridge.repos.environments import make_environment
from nightbridge.repos.git import git_version, masked
from nightbridge.repos.mirrors import Mirror


def make_checkout(spec: RunSpec, site: Site) -> Checkout:
    """Pin Megatron-Bridge and NeMo-Run for the run's night, check them out, and make the launcher's environment.

    Every step runs once, in the first process; all others, on any host that sees the workspace, wait and share it.

    Raises:
        InvalidInput: A repository or ref does not exist.
        PermanentError: A repository refuses us, or the environment cannot be made.
        TransientError: A repository or the package index is unreachable, or another process holds a lease too long.
    """
    code = make_code(spec.test, site, spec.night)
    if not spec.test.has_launcher:
        return code
    nemo_run = _pinned_checkout(spec.test.nemo_run_repo, spec.night, site)
    environment = make_environment(nemo_run, site.environments_dir, wheels=site.wheels)
    return code.model_copy(update={"nemo_run": nemo_run, "environment": environment})


def make_code(test: TestDefinition, site: Site, night: str) -> Checkout:
    """Pin and check out the code that a test's arguments are for; no NeMo-Run, and no environment to start it in.

    Raises:
        InvalidInput: The repository or the ref does not exist.
        PermanentError: The repository refuses us.
        TransientError: It cannot be reached.
    """
    return Checkout(megatron_bridge=_pinned_checkout(test.megatron_bridge, night, site))


def current_commits(repo: GitRepo, site: Site) -> dict[str, str]:
    """The commits that a repository's ref (`.`) and those of submodules that it names (by folder) mean at this moment.

    Nothing is pinned. Errors as for `make_code`.
    """
    git_version()
    mirror = Mirror(repo.url, site.workspace, timeout=site.git_timeout)
    commit = mirror.resolve(repo.commit)
    return {".": commit, **_submodules(repo, mirror, commit, site, Mirror.resolve)}


def verify_unchanged(checkout: Checkout, since: datetime) -> list[str]:
    """The differences of the two trees from their commits, one line each; empty when nothing changed.

    Called after a run: a modified tree means that the tested code is unknown.

    A tree that was found modified and recreated after `since`, when the run began to use it, counts as well.

    Raises:
        TransientError: git did not answer in time.
    """
    return [
        f"{repository.url}: {change}"
        for repository in checkout.repositories
        for change in (*find_replaced(repository.path, since), *find_changes(repository.path, repository.commit))
    ]


def _pinned_checkout(repo: GitRepo, night: str, site: Site) -> PinnedRepository:
    git_version()
    workspace = site.workspace.absolute()
    mirror = Mirror(repo.url, workspace, timeout=site.git_timeout)
    pin = pinned(mirror, repo.commit, night, workspace)
    moved = _submodules(
        repo, mirror, pin.commit, site, lambda submodule, ref: pinned(submodule, ref, night, workspace).commit
    )
    checkout = check_out(mirror, repo.commit, pin.commit, workspace, with_submodules=repo.init_submodules, moved=moved)
    if pin.previous is None:
        return checkout
    since = mirror.commits_between(pin.previous, pin.commit)
    return checkout.model_copy(update={"previous": pin.previous, "commits_since": since})


def _submodules(repo: GitRepo, mirror: Mirror, commit: str, site: Site, find: Find) -> dict[str, str]:
    """The commits of the submodules that a test names refs for, each found in its own repository's mirror.

    A folder that is no submodule keeps its ref: `check_out` says so.
    """
    if not repo.submodules:
        return {}
    if not repo.init_submodules:
        what = "submodules are named but not checked out"
        advice = "Set init_submodules = true, or name none: the image brings its own"
        raise InvalidInput(what, subject=f"{', '.join(repo.submodules)} of {masked(repo.url)}", advice=advice)
    mirror.resolve(commit)
    urls = {one.path: one.url for one in find_submodules(mirror, commit)}
    return {
        path: find(Mirror(urls[path], site.workspace, timeout=site.git_timeout), ref) if path in urls else ref
        for path, ref in repo.submodules.items()
    }
