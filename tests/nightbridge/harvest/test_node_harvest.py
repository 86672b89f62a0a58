"""Harvests by a job on a compute node of a real Slurm."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.harvest.harvesting import HarvestRequest, run_harvest
from nightbridge.harvest.manifest import MANIFEST, read_manifest
from nightbridge.harvest.node_harvest import NodeSecrets, harvest_on_node
from nightbridge.harvest.restore import verify_run
from nightbridge.models import ClusterSettings, JobState, SecretRef, StoreSettings
from nightbridge.node_programs import NodeResponse, SerializedError, read_response
from nightbridge.processes import Finished
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.node_command import run_on_node
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.store.parallel import Progress
from tests.nightbridge.harvest.left_run import TOKEN, LeftRun, make_run
from tests.real.s3_servers import S3Server
from tests.real.slurm_daemons import SlurmDaemons
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TOKEN_REF = SecretRef(source="block", name="hf-token")


@pytest.fixture
def left(tmp_path: Path) -> LeftRun:
    return make_run(tmp_path / "workspace", shard_size=1000)


@pytest.fixture
def srun(slurm_cluster: SlurmDaemons) -> functools.partial[Finished]:
    cluster = ClusterSettings(kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf)
    return functools.partial(run_on_node, cluster, options=("--time=5", "--mem=200"))


def request_of(left: LeftRun, store: StoreSettings) -> HarvestRequest:
    return HarvestRequest(
        run=left.spec,
        checkout=left.checkout,
        image=left.image,
        plan=left.plan,
        jobs=left.jobs,
        store=store,
        series="llama3-8b-0123456789ab",
    )


def contents(store: ObjectStore) -> set[bytes]:
    return {store.get(found.key) or b"" for found in store.list("")}


def test_what_the_node_gets_is_in_no_error_about_it() -> None:
    given = NodeSecrets(variables={"KEY": TOKEN}, masked=(TOKEN,)).model_dump_json()
    for cut in range(1, len(given)):
        with pytest.raises(ValidationError) as error:
            NodeSecrets.model_validate_json(given[:-cut])
        assert TOKEN[:8] not in str(error.value)
        assert TOKEN[-8:] not in str(error.value)


def test_a_node_stores_what_this_host_would_have_stored(
    left: LeftRun, srun: functools.partial[Finished], tmp_path: Path
) -> None:
    here, there = (StoreSettings(url=f"file://{tmp_path}/{name}") for name in ("here", "there"))
    expected = run_harvest(request_of(left, here), open_store(here), [TOKEN])
    told: list[Progress] = []

    record = harvest_on_node(request_of(left, there), open_store(there), {TOKEN_REF: TOKEN}, srun, 600, told.append)

    paths = {found.key for found in open_store(here).list("")}
    assert {found.key for found in open_store(there).list("")} == paths
    assert verify_run(open_store(there), record.prefix) == []
    assert record.summary == expected.summary
    assert told[-1].files_done == told[-1].files_total > 0
    assert [data for data in contents(open_store(there)) if TOKEN.encode() in data] == []
    # Neither the request nor anything else of the attempt holds the token, but for what the job itself wrote.
    written = {path for path in left.plan.attempt_dir.rglob("*") if path.is_file() and TOKEN in _text(path)}
    assert written == {left.output.logs[0], left.output.config_container, left.plan.attempt_dir / "job.sh"}


def test_of_a_committed_run_nothing_is_read_here_again(left: LeftRun, tmp_path: Path) -> None:
    here = StoreSettings(url=f"file://{tmp_path}/here")
    record = run_harvest(request_of(left, here), open_store(here), [TOKEN])
    shutil.rmtree(left.plan.attempt_dir)
    assert run_harvest(request_of(left, here), open_store(here), [TOKEN]) == record


@pytest.mark.s3
def test_the_stores_keys_reach_the_node_and_no_file(
    left: LeftRun, srun: functools.partial[Finished], ceph: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceph.make_bucket("on-a-node")
    monkeypatch.setenv("NB_TEST_ACCESS", ceph.access_key)
    monkeypatch.setenv("NB_TEST_SECRET", ceph.secret_key)
    access, secret = (SecretRef(source="env", name=name) for name in ("NB_TEST_ACCESS", "NB_TEST_SECRET"))
    settings = StoreSettings(url="s3://on-a-node", endpoint_url=ceph.endpoint_url, access_key=access, secret_key=secret)
    secrets = {TOKEN_REF: TOKEN, access: ceph.access_key, secret: ceph.secret_key}

    record = harvest_on_node(request_of(left, settings), open_store(settings), secrets, srun, 600)

    assert verify_run(open_store(settings), record.prefix) == []
    assert [
        path for path in left.plan.attempt_dir.rglob("*") if path.is_file() and ceph.secret_key in _text(path)
    ] == []


def test_what_goes_wrong_on_the_node_is_the_same_error_here(
    left: LeftRun, srun: functools.partial[Finished], tmp_path: Path
) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    store = open_store(settings)
    request = request_of(left, settings)
    record = run_harvest(request, store, [TOKEN])
    manifest = read_manifest(store, record.prefix)
    assert manifest is not None
    victim = next(file for file in manifest.files if file.kind == "log")
    store.delete(f"{record.prefix}/{victim.path}")

    with pytest.raises(DamagedData, match=r"1 of its objects") as caught:
        harvest_on_node(request, store, {TOKEN_REF: TOKEN}, srun, 600)

    assert caught.value.subject == store.url_of(record.prefix)


def test_two_workspaces_that_harvest_the_same_night_do_not_cancel_each_others_jobs(
    left: LeftRun, srun: functools.partial[Finished], tmp_path: Path
) -> None:
    """Their runs have the same key, and an orphaned harvest is found, and ended, by its job's name."""
    cluster = CommandLineCluster(srun.args[0])
    names: list[str] = []
    answers: list[Finished] = []

    def occupied(name: str, *_: object, **__: object) -> Finished:
        names.append(name)
        answers.append(srun(name, ["sleep", "15"], environment={}, timeout=300))
        return answers[0]

    settings = StoreSettings(url=f"file://{tmp_path}/store")
    other = make_run(tmp_path / "another", shard_size=1000)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(harvest_on_node, request_of(left, settings), open_store(settings), {}, occupied, 300)
        wait_until(lambda: names and any(job.state is JobState.RUNNING for job in cluster.find(names[0]).jobs))
        record = harvest_on_node(request_of(other, settings), open_store(settings), {}, srun, 300)
        assert isinstance(first.exception(), TransientError)

    assert verify_run(open_store(settings), record.prefix) == []
    assert answers[0].code == 0


def test_what_a_site_prints_around_the_answer_of_a_node_is_none() -> None:
    """SrunProlog and SrunEpilog of slurm.conf write to srun's stdout, as tried with 22.05."""
    answer = NodeResponse(failure=SerializedError.of(DamagedData("half a checkpoint", subject="run"))).model_dump_json()
    printed = f"balance:\n1200\n{answer}\nused 3 node-hours\n{{}}\n\n".encode()

    with pytest.raises(DamagedData, match="half a checkpoint"):
        read_response(Finished(1, printed, ""), NodeResponse, doing="harvest", subject="run", instead="x")


@pytest.mark.parametrize(("code", "kind"), [(137, TransientError), (0, TransientError), (1, PermanentError)])
def test_a_node_that_gives_no_answer_is_told_from_one_that_cannot_start(
    left: LeftRun, tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    store = open_store(settings)

    with pytest.raises(kind):
        harvest_on_node(
            request_of(left, settings),
            store,
            {},
            lambda *_, **__: Finished(code=code, stdout=b"", stderr="so it is"),
            600,
        )

    assert [found.key for found in store.list("") if found.key.endswith(MANIFEST)] == []


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")
