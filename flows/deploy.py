"""`nightbridge deploy`: work pool, queues, blocks, result storage and deployments."""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow
from prefect.settings import PREFECT_API_URL, PREFECT_HOME
from prefect.utilities.importtools import import_object
from prefect.workers.process import ProcessWorker
from pydantic import Field, ValidationError

from nightbridge import __version__, blocks
from nightbridge.blocks import HarvestStore, load_site
from nightbridge.config.scenarios import Histories, shared_histories
from nightbridge.errors import InvalidInput
from nightbridge.flows.automations import make_automations, notification_blocks
from nightbridge.flows.forms import form_of, own_scenarios, scenarios_beside, site_of_form, site_parameters
from nightbridge.flows.server import reach_blocks, reach_server
from nightbridge.models import Model, Scenario, SiteChoice, slug
from nightbridge.models import Site as SiteSettings
from nightbridge.tasks.prefect_calls import tagged

NIGHTS = "nightly"
"""The definition in prefect.yaml whose deployments run nights; those of files have these in their names, too."""

PROJECT, DEFINITION = "nightbridge", "prefect.yaml"
"""The name in our file, which is in the current folder, as for `prefect deploy`, or else beside this module."""

BLOCKS: tuple[type[Block], ...] = tuple(
    block for block in map(vars(blocks).get, blocks.__all__) if isinstance(block, type) and issubclass(block, Block)
)

FORMER_AUTOMATIONS = ("nightbridge: crash flow runs without a heartbeat",)
"""It crashed everybody's flow runs, and the living after an outage of the server; the reaper took its place."""

_REQUIRED = frozenset({"name", "entrypoint", "description", "tags", "work_pool"})
"""What each deployment of a prefect.yaml has."""

RESULTS_SETTING = "PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK"


class Request(Model):
    """What is deployed: each deployment of `prefect.yaml`, as it is there or for these scenarios at this site."""

    files: tuple[Path, ...] = Field((), description="Scenarios; those of prefect.yaml, under its names, when empty.")
    choice: SiteChoice = SiteChoice()
    cron: str | None = Field(None, description="When nights begin; as in prefect.yaml when unset.")
    timezone: str | None = Field(None, description="Zone of all schedules; as in prefect.yaml when unset.")
    git: str | None = Field(None, description="Repository that workers pull scenarios from; this folder when unset.")
    branch: str | None = Field(None, description="Its branch; the repository's own when unset.")
    git_token: str | None = Field(None, description="Name of a Secret block with a token for it.")


class _Wanted(NamedTuple):
    """One deployment to make: its definition in prefect.yaml, its flow, and the scenario that it is for."""

    request: Request
    cluster: str
    definition: Mapping[str, Any]
    flow: Flow[..., Any]
    file: Path | None
    offered: Mapping[str, Scenario]

    @property
    def swept(self) -> bool:
        return bool(self.definition["name"] == "sweep")

    @property
    def has_tests(self) -> bool:
        """Whether its form offers a test; of a scenario without a sweep that for sweeps would have none."""
        scenario = self.offered.get(str(self.file))
        return self.file is None or bool(scenario and any(test.axes or not self.swept for test in scenario.tests))

    @property
    def is_of_site(self) -> bool:
        return "system" in self.flow.parameters.properties

    @property
    def name(self) -> str:
        """As in prefect.yaml, where nothing else is requested; else with the scenario and the cluster."""
        parts = [self.definition["name"]]
        if self.request.files:
            parts += [slug(self.file.stem)] if self.file else []
            parts += [slug(self.cluster)] if self.is_of_site else []
        return "-".join(parts)

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"

    @property
    def tags(self) -> list[str]:
        of_site = [f"cluster:{self.cluster}"] if self.is_of_site else []
        of_scenario = [f"scenario:{self.offered[str(self.file)].name}"] if self.file else []
        return [*self.definition["tags"], *of_scenario, *of_site]

    @property
    def queue(self) -> str | None:
        queue = self.definition["work_pool"].get("work_queue_name")
        return f"{queue}-{slug(self.cluster)}" if queue and self.request.files else queue

    def schedules(self, off: Collection[str] = ()) -> list[DeploymentScheduleCreate]:
        """Its schedules; those whose slugs are in `off` are switched off."""
        cron, timezone = self.request.cron if self.file else None, self.request.timezone
        return [
            DeploymentScheduleCreate(
                schedule=_cron_schedule(cron or given["cron"], timezone or given.get("timezone")),
                slug=given["slug"],
                active=given["slug"] not in off,
            )
            for given in self.definition.get("schedules", ())
        ]

    def parameters(self, of_site: Mapping[str, Any]) -> dict[str, Any]:
        """What its flow is given: of prefect.yaml, of the site, and of the request."""
        timezone = self.request.timezone if "timezone" in self.flow.parameters.properties else None
        return {
            **self.definition.get("parameters", {}),
            **({"scenario": str(self.file)} if self.file else {}),
            **of_site,
            **({"timezone": timezone} if timezone else {}),
        }


def _cron_schedule(cron: str, timezone: str | None) -> CronSchedule:
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        wrong = error.errors()[0]
        what = wrong["msg"].removeprefix("Value error, ")
        raise InvalidInput(what, subject=str(wrong["input"]), advice="Check --cron and --timezone") from error


def _definitions() -> list[Mapping[str, Any]]:
    """What this folder's prefect.yaml defines where that is nightbridge's, else what the shipped one does."""
    try:
        own = yaml.safe_load(Path(DEFINITION).read_text("utf-8"))
    except FileNotFoundError:
        own = None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidInput(f"cannot be read: {' '.join(str(error).split())}", subject=DEFINITION) from error
    if not isinstance(own, dict) or own.get("name") != PROJECT:  # of another project, which has its own
        own = yaml.safe_load(Path(__file__).with_name(DEFINITION).read_text("utf-8"))
    definitions: list[Mapping[str, Any]] = []
    for each in own.get("deployments") or []:
        given = {key: value for key, value in each.items() if value is not None} if isinstance(each, dict) else {}
        if lacking := ", ".join(_lacking(given)):
            advice = "Add it, as the prefect.yaml of nightbridge has it"
            raise InvalidInput(f"a deployment lacks {lacking}", subject=DEFINITION, advice=advice)
        definitions.append(given)
    return definitions


def _lacking(definition: Mapping[str, Any]) -> Iterator[str]:
    """The keys that each deployment has, and this one has not."""
    yield from sorted(_REQUIRED - definition.keys())
    parts: list[tuple[str, Sequence[str], Any]] = [("work_pool", ("name",), definition.get("work_pool", {"name"}))]
    parts += [("schedules", ("cron", "slug"), given) for given in definition.get("schedules", ())]
    yield from (f"{part}.{key}" for part, keys, given in parts for key in keys if key not in (given or ()))


def deploy(request: Request = Request()) -> Iterator[str]:  # noqa: B008  (frozen)
    """Make work pool, queues, blocks and deployments, and remove what older releases left.

    A queue runs one flow run at a time. A pool or queue that exists keeps its settings.

    Returns:
        What there is now, a line each.

    Raises:
        InvalidInput: A scenario, a schedule, the site, one of its blocks or a secret of its `[notify]` is wrong, or a
            deployment would replace that of another scenario or site; nothing was deployed.
        TransientError: The Prefect server does not answer.
    """
    _check_git(request)
    definitions = _definitions()
    offered = scenarios_beside(request.files or own_scenarios(definitions))
    reach_blocks(request.choice)
    site = load_site(request.choice)
    cluster = site.cluster.name
    every = (each for definition in definitions for each in _wanted(request, cluster, definition, offered))
    wanted = [each for each in every if each.has_tests]
    _check_names(wanted)
    for each in wanted:
        each.schedules()
    reach_server()  # only now: one of this process's own takes half a minute to start
    with get_client(sync_client=True) as client:
        _check_git_token(client, request)
        given = site_parameters(client, _lasting(request, site))
        recipients = notification_blocks(site)
        formers = {each.full_name: former for each in wanted if (former := _former(client, each.full_name))}
        _check_formers(wanted, formers, given.get("system"))
        for block in BLOCKS:
            block.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
        for name in FORMER_AUTOMATIONS:
            for automation in client.read_automations_by_name(name):
                client.delete_automation(automation.id)
        queues = {(each.definition["work_pool"]["name"], each.queue) for each in wanted}
        template = ProcessWorker.get_default_base_job_template()
        for pool in sorted({pool for pool, _ in queues}):
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
        for pool, queue in sorted((pool, queue) for pool, queue in queues if queue):
            yield _make_queue(client, pool, queue)
        results = _results_block(site)
        for each in wanted:
            name, former = each.full_name, formers.get(each.full_name)
            # It is about to get new schedules: what somebody has switched off stays so.
            off = [known.slug for known in former.schedules if known.slug and not known.active] if former else []
            parameters = each.parameters(site_of_form(each.flow, given, site))
            _make_deployment(client, each, parameters, results, off)
            replaced = "".join(f", its {what}" for what in _replaced(former, each, parameters)) if former else ""
            yield f"deployment {name}{', its schedule stays switched off' if off else ''}{replaced}"
        yield from make_automations(client, cluster, recipients)
    histories: Histories = {}
    nights = dict.fromkeys(str(each.file) for each in wanted if each.file and each.definition["name"] == NIGHTS)
    for found in (each for file in nights for each in shared_histories(offered[file], histories)):
        yield f"warning: {found}"
    yield from without_server()


def without_server() -> Iterator[str]:
    """Where the deployments are when no server is configured: in a database that a server may never read."""
    if not PREFECT_API_URL.value():
        kept = PREFECT_HOME.value()
        yield f"PREFECT_API_URL is not set: this is in Prefect's database in {kept}; to deploy to a server, set it"


def _check_git(request: Request) -> None:
    """Refuse what would not come from the repository although it seems so."""
    if request.git is None and (request.branch or request.git_token):
        raise InvalidInput("no repository is named", subject="--branch, --git-token", advice="Give --git as well")
    for file in request.files if request.git else ():
        if file.is_absolute():
            what = "a file of this machine, and workers pull the scenarios from git"
            advice = "Call this in a clone of the repository, and give the file's path in it"
            raise InvalidInput(what, subject=str(file), advice=advice)


def _check_git_token(client: SyncPrefectClient, request: Request) -> None:
    """Refuse the name of a Secret block that does not exist: every flow run would end before it begins."""
    if request.git_token:
        try:
            client.read_block_document_by_name(request.git_token, Secret.get_block_type_slug())
        except ObjectNotFound as error:
            advice = "Make it in the Prefect UI"
            raise InvalidInput("no Secret block of this name", subject=request.git_token, advice=advice) from error


def _wanted(
    request: Request, cluster: str, definition: Mapping[str, Any], offered: Mapping[str, Scenario]
) -> Iterator[_Wanted]:
    """A deployment of each scenario that is requested, else of the definition's own; one where it is of none."""
    try:
        flow: Flow[..., Any] = import_object(definition["entrypoint"])
    except (ImportError, AttributeError, ValueError) as error:
        advice = f"Correct the entrypoint of {definition['name']} in {DEFINITION}"
        raise InvalidInput(f"no such flow: {error}", subject=str(definition["entrypoint"]), advice=advice) from error
    own = definition.get("parameters", {}).get("scenario")
    for file in (request.files or [Path(own)]) if own else [None]:
        yield _Wanted(request, cluster, definition, flow, file, offered)


def _check_names(wanted: Iterable[_Wanted]) -> None:
    """Refuse files whose deployments would have the same names: the last one's would replace the others'."""
    files: dict[str, Path] = {}
    for each in wanted:
        if each.file is None:
            continue
        other = files.setdefault(each.name, each.file)
        if other.absolute() != each.file.absolute():
            what = f"both would be the deployment {each.name}"
            raise InvalidInput(what, subject=f"{other} and {each.file}", advice="Rename one of them")


def _former(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """The deployment that one of this name is about to replace."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _replaced(former: DeploymentResponse, wanted: _Wanted, parameters: Mapping[str, Any]) -> Iterator[str]:
    """What is no more of its schedules and parameters: somebody may have chosen it in the UI, and count on it."""
    kept = [schedule.schedule for schedule in wanted.schedules()]
    for one in (known.schedule for known in former.schedules if known.schedule not in kept):
        if isinstance(one, CronSchedule):
            yield f"schedule was {one.cron} {one.timezone or 'UTC'}"
        else:
            yield "schedule of another kind is gone"
    # The UI writes down every field of its form, those that were left alone by their defaults.
    fields = wanted.flow.parameters.properties.items()
    now = {name: parameters.get(name, field.get("default")) for name, field in fields}
    for given in (former.parameters, *(known.parameters for known in former.schedules)):
        for name, value in given.items():
            if value not in (None, "", [], now.get(name, value)):
                yield f"parameter {name} was {json.dumps(value)}"


def _check_formers(wanted: Iterable[_Wanted], formers: Mapping[str, DeploymentResponse], system: object) -> None:
    """Refuse to replace the deployment of another scenario or another site, which would not be run any more."""
    for each in wanted:
        name, former = each.full_name, formers.get(each.full_name)
        if former is None:
            continue
        advice = f"or remove that one first: prefect deployment delete {name}"
        cluster, scenario = (tagged(former.tags, kind) for kind in ("cluster", "scenario"))
        is_other_site = former.parameters.get("system") not in (None, system)
        if is_other_site and each.is_of_site and cluster not in ("", each.cluster):
            what = f"it would replace the deployment {name} of the cluster {cluster}"
            advice = f"Name the scenarios, so that each cluster has deployments of its own, {advice}"
            raise InvalidInput(what, subject=each.cluster, advice=advice)
        if each.file is None or not each.request.files:
            continue
        place = former.parameters.get("scenario"), former.pull_steps
        is_same_file = place == (str(each.file), [_pull_step(each.request)])  # its scenario may be renamed
        if not is_same_file and scenario not in ("", each.offered[str(each.file)].name):
            what = f"it would replace the deployment {name} of the scenario {scenario}"
            raise InvalidInput(what, subject=str(each.file), advice=f"Rename the file, {advice}")


def _lasting(request: Request, site: SiteSettings) -> SiteChoice:
    """The site as it is named; a workspace in the clone, which Prefect removes with the flow run, by its path here."""
    in_clone = request.git is not None and site.workspace.is_relative_to(Path.cwd())
    return request.choice.model_copy(update={"workspace": site.workspace}) if in_clone else request.choice


def _results_block(site: SiteSettings) -> str:
    """The block of the site's store, where results are kept so that any worker can continue; made if missing."""
    store = site.store_settings
    # One for each store: deployments of a cluster may have several, and each night checks that it still has its own.
    name = f"results-{slug(site.cluster.name)}-{sha256(store.url.encode()).hexdigest()[:8]}"
    HarvestStore(**store.model_dump(exclude={"retention"})).save(name, overwrite=True, _sync=True)  # type: ignore[call-arg]
    return f"{HarvestStore.get_block_type_slug()}/{name}"


def _make_deployment(
    client: SyncPrefectClient, wanted: _Wanted, parameters: dict[str, Any], results: str, off: Collection[str]
) -> None:
    request, flow, definition = wanted.request, wanted.flow, wanted.definition
    pool, limit = definition["work_pool"], definition.get("concurrency_limit", {})
    environment = {**pool.get("job_variables", {}).get("env", {}), RESULTS_SETTING: results}
    client.create_deployment(
        flow_id=client.create_flow(flow),
        name=wanted.name,
        version=__version__,
        entrypoint=definition["entrypoint"],
        description=definition["description"],
        tags=wanted.tags,
        parameters=parameters,
        parameter_openapi_schema=form_of(flow, parameters, wanted.offered, swept=wanted.swept),
        enforce_parameter_schema=True,
        schedules=wanted.schedules(off),
        concurrency_limit=limit.get("limit"),
        concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]) if limit else None,
        pull_steps=[_pull_step(request)],
        work_pool_name=pool["name"],
        work_queue_name=wanted.queue,
        job_variables={"env": environment},
    )


def _pull_step(request: Request) -> dict[str, Any]:
    """What a worker does before a flow run: the scenarios are in this folder, or in git."""
    if request.git is None:
        return {"prefect.deployments.steps.set_working_directory": {"directory": str(Path.cwd())}}
    token = f"{{{{ prefect.blocks.secret.{request.git_token} }}}}" if request.git_token else None
    options = {"repository": request.git, "branch": request.branch, "access_token": token}
    return {"prefect.deployments.steps.git_clone": {name: value for name, value in options.items() if value}}


def _make_queue(client: SyncPrefectClient, pool: str, name: str) -> str:
    try:
        queue = client.read_work_queue_by_name(name, work_pool_name=pool)
    except ObjectNotFound:
        queue = client.create_work_queue(name, work_pool_name=pool, concurrency_limit=1)
    return f"work queue {name} of {pool}: {queue.concurrency_limit or 'any number of'} flow run(s) at a time"
