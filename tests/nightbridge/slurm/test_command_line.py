"""Slurm's own commands, against real daemons, and what their texts mean."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import (
    InvalidInput,
    LaunchRefused,
    NightbridgeError,
    PermanentError,
    StatusUnknown,
    TransientError,
)
from nightbridge.models import ClusterSettings, JobState, JobStatus
from nightbridge.slurm.command_line import SUBMIT_TIMEOUT, CommandLineCluster
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.slurm.sbatch_errors import refusal_of
from nightbridge.slurm.states import TERMINAL, merge, newest, parse_sacct, parse_squeue, waiting_words
from tests.real.slurm_daemons import COMMANDS, SlurmDaemons


def eventually(ask: Callable[[], Any], right: Callable[[Any], bool], timeout: float = 240.0) -> Any:
    end = time.monotonic() + timeout
    while not right(answer := ask()):
        assert time.monotonic() < end, f"still {answer}"
        time.sleep(0.2)
    return answer


@pytest.fixture
def script(workspace: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = workspace / "script.sh"
        path.write_text(f"#!/bin/bash\n#SBATCH --output={workspace}/out-%j\n{body}\n")
        return path

    return write


# --- on real daemons -------------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_a_job_is_found_by_its_name_live_and_ended(
    cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str
) -> None:
    job_id = cluster.submit(run_key, script("sleep 2; exit 3"), ["--nodes=2"])

    live = cluster.find(run_key)
    ended = eventually(lambda: cluster.find(run_key), lambda found: found.jobs[0].exit_code is not None)

    assert live.complete
    assert [job.job_id for job in live.jobs] == [job_id]
    assert live.jobs[0].state not in TERMINAL
    assert ended.complete
    assert [(job.job_id, job.name, job.state, job.exit_code) for job in ended.jobs] == [
        (job_id, run_key, JobState.FAILED, 3)
    ]
    assert ended.jobs[0].nodes == "node[1-2]"
    assert ended.jobs[0].submitted_at is not None
    assert abs(ended.jobs[0].submitted_at.timestamp() - time.time()) < 60


@pytest.mark.slurm
def test_an_unused_name_is_a_complete_and_empty_answer(cluster: CommandLineCluster) -> None:
    found = cluster.find("nobody-ever-used-this")

    assert (found.jobs, found.complete) == ((), True)


@pytest.mark.slurm
def test_many_jobs_are_queried_at_once_and_unknown_ones_are_left_out(
    cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str
) -> None:
    good = cluster.submit(f"{run_key}-good", script("true"), [])
    bad = cluster.submit(f"{run_key}-bad", script("kill -TERM $$"), [])

    states = eventually(
        lambda: cluster.states([good, bad, 999_999]),
        lambda answer: all(row.exit_code is not None for row in answer.values()) and len(answer) == 2,
    )

    assert states[good].state is JobState.COMPLETED
    assert states[bad].state is JobState.FAILED
    assert (states[bad].exit_code, states[bad].signal) == (0, 15)


@pytest.mark.slurm
def test_slurmctld_tells_a_jobs_script(
    cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str
) -> None:
    path = script("sleep 60")
    job_id = cluster.submit(run_key, path, [])

    assert cluster.script_of(job_id) == path
    assert cluster.script_of(999_999) is None
    cluster.cancel(job_id)


@pytest.mark.slurm
def test_a_cancelled_job_names_its_canceller_and_cancelling_twice_is_no_error(
    cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str
) -> None:
    job_id = cluster.submit(run_key, script("sleep 60"), [])

    cluster.cancel(job_id)
    status = eventually(lambda: cluster.states([job_id])[job_id], lambda row: row.cancelled_by != "")
    cluster.cancel(job_id)
    cluster.cancel(999_999)

    assert status.state is JobState.CANCELLED
    assert status.cancelled_by == "0"


@pytest.mark.slurm
def test_limits_are_the_partitions(cluster: CommandLineCluster) -> None:
    limits = cluster.limits()

    assert limits.partitions == ("debug",)
    assert limits.partition == "debug"
    assert limits.gres == ()
    assert limits.accounts is None
    assert limits.max_nodes == 2
    assert limits.max_time_seconds == 8 * 3600
    assert limits.gpus_per_node is None
    assert not limits.has_pyxis


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--partition=nope", "no such partition"),
        ("--time=tomorrow", "time limit"),
        ("--nodes=many", "number of nodes"),
        ("--gres=gpu:8", "GPUs"),
        ("--mem=900G", "no node of the partition can run this"),
        ("--reservation=nope", "reservation"),
        ("--no-such-option", "does not know an option"),
    ],
)
def test_what_sbatch_refuses_for_good_is_refused_with_advice(
    option: str, what: str, cluster: CommandLineCluster, script: Callable[[str], Path]
) -> None:
    with pytest.raises(LaunchRefused, match=what) as refusal:
        cluster.submit("refused", script("true"), [option])

    assert refusal.value.advice


@pytest.mark.slurm
def test_the_callers_slurm_variables_are_kept_out(
    cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    monkeypatch.setenv("SACCT_FORMAT", "user")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("TZ", "Pacific/Auckland")

    job_id = cluster.submit(run_key, script("sleep 1"), [])
    status = cluster.states([job_id])[job_id]

    assert status.submitted_at is not None
    assert abs(status.submitted_at.timestamp() - time.time()) < 60


@pytest.mark.slurm
def test_without_slurmdbd_a_lookup_is_incomplete_and_states_still_come(
    slurm_cluster: SlurmDaemons, cluster: CommandLineCluster, script: Callable[[str], Path], run_key: str
) -> None:
    slurm_cluster.kill_daemon("slurmdbd")
    try:
        job_id = cluster.submit(run_key, script("exit 5"), [])

        assert not cluster.find("nobody-ever-used-this").complete
        assert [job.job_id for job in cluster.find(run_key).jobs] == [job_id]
        ended = eventually(lambda: cluster.states([job_id])[job_id], lambda row: row.state in TERMINAL)
        assert (ended.state, ended.exit_code) == (JobState.FAILED, 5)
    finally:
        slurm_cluster.start_daemon("slurmdbd")
        eventually(lambda: cluster.find(run_key).complete, bool)


@pytest.mark.slurm
def test_a_site_that_allows_its_users_one_day_of_accounting_gives_certain_answers(
    slurm_cluster: SlurmDaemons, settings: ClusterSettings, tmp_path: Path
) -> None:
    # Root may ask for any range.
    sacct = tmp_path / "sacct"
    sacct.write_text(f'#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups {COMMANDS}/sacct "$@"\n')
    sacct.chmod(0o755)
    cluster = CommandLineCluster(settings.model_copy(update={"bin_dir": tmp_path}))
    conf = slurm_cluster.folder / "slurmdbd.conf"
    as_it_was = conf.read_text()
    conf.write_text(f"{as_it_was}MaxQueryTimeRange=1-0\n")
    slurm_cluster.kill_daemon("slurmdbd")
    slurm_cluster.start_daemon("slurmdbd")
    try:
        eventually(lambda: slurm_cluster.command("sacctmgr", "show", "cluster").returncode == 0, bool)

        assert cluster.find("nobody-ever-used-this").complete
    finally:
        conf.write_text(as_it_was)
        slurm_cluster.kill_daemon("slurmdbd")
        slurm_cluster.start_daemon("slurmdbd")
        eventually(lambda: cluster.find("nobody-ever-used-this").complete, bool)


# --- commands that misbehave -----------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., CommandLineCluster]:
    """A cluster whose commands are these shell scripts."""

    def make(**commands: str) -> CommandLineCluster:
        for name in ("sbatch", "squeue", "sacct", "sacctmgr", "scancel", "scontrol", "sinfo", "srun"):
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{commands.get(name, 'exit 1')}\n")
            path.chmod(0o755)
        return CommandLineCluster(ClusterSettings(kind="slurm", name="fake", bin_dir=tmp_path))

    return make


@pytest.mark.parametrize(
    "stdout", ["4711", "4711;cluster-a", "Welcome!\\nMaintenance on Monday 9.\\n4711", "Submitted batch job 4711"]
)
def test_the_id_is_read_through_banners_and_cluster_names(stdout: str, fake: Callable[..., CommandLineCluster]) -> None:
    assert fake(sbatch=f"printf '{stdout}\\n'").submit("name", Path("x.sh"), []) == 4711


@pytest.mark.parametrize(
    "stdout",
    ["4711\\nYour balance in GPU-hours:\\n1200", "1200\\n4711", "4711;fake\\n1200\\n", "Job 4711 it is:\\n1200"],
)
def test_of_several_numbers_the_id_is_that_of_the_job_with_the_name(
    stdout: str, fake: Callable[..., CommandLineCluster]
) -> None:
    """What a module system, or a site's wrapper of sbatch, prints around sbatch's own line."""
    row = "{}|PENDING|2026-01-01T00:00:00|N/A|N/A||None|{}\\t(null)\\n"
    sbatch, config = f"printf '{stdout}\\n'", "echo 'ClusterName = fake'"
    knows = f"printf '{row.format(1200, 'other')}{row.format(4711, 'name')}'"

    if stdout.startswith("Job"):
        with pytest.raises(StatusUnknown, match=r"printed 1200, and squeue has no such job of this name"):
            fake(sbatch=sbatch, squeue=knows).submit("name", Path("x.sh"), [])
        return
    assert fake(sbatch=sbatch, squeue=knows, scontrol=config).submit("name", Path("x.sh"), []) == 4711
    for squeue in ("exit 1", f"printf '{row.format(1200, 'other')}'", f"printf '{row.format(5, 'name')}'"):
        with pytest.raises(StatusUnknown, match=r"printed 1200, 4711.*looked up before the next try"):
            fake(sbatch=sbatch, squeue=squeue, scontrol=config).submit("name", Path("x.sh"), [])


@pytest.mark.parametrize("numbers", ["1200", "77\\n1200"])
@pytest.mark.parametrize(
    ("reason", "kind"),
    [("Invalid qos specification", LaunchRefused), ("Socket timed out on send/recv operation", StatusUnknown)],
)
def test_a_number_that_a_wrapper_prints_beside_a_refusal_is_no_job(
    reason: str, kind: type[NightbridgeError], numbers: str, fake: Callable[..., CommandLineCluster]
) -> None:
    said = f"printf '{numbers}\\n'; echo 'sbatch: error: Batch job submission failed: {reason}' >&2"
    row = "1200|PENDING|2026-01-01T00:00:00|N/A|N/A||None|{}\\t(null)\\n"

    for squeue in ("exit 0", "exit 1", f"printf '{row.format('other')}'"):
        with pytest.raises(kind, match=re.escape(reason)) as refusal:
            fake(sbatch=f"{said}; exit 1", squeue=squeue).submit("name", Path("x.sh"), [])
        assert type(refusal.value) is kind
    # A wrapper that has tried again.
    tried = fake(sbatch=f"{said}; exit 1", squeue=f"printf '{row.format('name')}'")
    assert tried.submit("name", Path("x.sh"), []) == 1200


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "(kill -9 $$); exit 137"])
@pytest.mark.parametrize("warning", ["", "sbatch: Warning: can't run 1 processes on 2 nodes, setting nnodes to 1"])
def test_an_sbatch_that_ends_without_an_answer_leaves_open_whether_there_is_a_job(
    warning: str, end: str, fake: Callable[..., CommandLineCluster]
) -> None:
    with pytest.raises(StatusUnknown, match="may exist"):
        fake(sbatch=f'printf "%s" "{warning}" >&2; {end}').submit("name", Path("x.sh"), [])


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "RUNNING"])
def test_a_warning_of_scancel_is_a_failure_where_the_job_lives_on(
    state: str, fake: Callable[..., CommandLineCluster]
) -> None:
    """As a site's wrapper in bash writes it where the locale is missing."""
    row = f"7|{state}|2026-11-23T10:00:00|N/A|N/A||None|j"
    cluster = fake(scancel="echo 'warning: setlocale: LC_ALL: cannot change locale' >&2", squeue=f"echo '{row}'")

    lives_on = pytest.raises(TransientError, match="setlocale") if state == "RUNNING" else contextlib.nullcontext()
    with lives_on:
        cluster.cancel(7)


@pytest.mark.parametrize("end", ["kill -9 $$", "(kill -9 $$); exit 137"])
def test_a_scancel_that_was_killed_has_cancelled_nothing(end: str, fake: Callable[..., CommandLineCluster]) -> None:
    with pytest.raises(TransientError, match="job 7: scancel failed: killed"):
        fake(scancel=end).cancel(7)


def test_where_slurm_gets_its_configuration_from_is_kept(
    fake: Callable[..., CommandLineCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF_SERVER", "login:6817")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")

    fake(sinfo='test "$SLURM_CONF_SERVER$SLURM_CLUSTERS" = login:6817 && echo "batch*|1:00|1|1|(null)"').limits()


def test_without_any_answer_the_status_is_unknown(fake: Callable[..., CommandLineCluster]) -> None:
    with pytest.raises(StatusUnknown):
        fake().states([1])


def test_a_site_that_forbids_long_ranges_is_queried_for_shorter_ones(fake: Callable[..., CommandLineCluster]) -> None:
    sacct = """case "$*" in *now-167hours*) echo "5|COMPLETED|2026-01-01T00:00:00|||None assigned|None|0:0|mine";;
    *) echo "sacct: error: slurmdbd: Query time range exceeds MaxQueryTimeRange" >&2; exit 1;; esac"""

    found = fake(squeue="exit 0", sacct=sacct).find("mine")

    assert found.complete
    assert [job.job_id for job in found.jobs] == [5]


def test_a_missing_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(PermanentError, match="squeue: command not found"):
        CommandLineCluster(ClusterSettings(kind="slurm")).states([1])


@pytest.mark.parametrize(("private", "position"), [("none", 2), ("cloud,jobs", None)])
def test_a_job_behind_others_says_where_it_stands(
    private: str, position: int | None, fake: Callable[..., CommandLineCluster]
) -> None:
    live = "7|PENDING|2026-11-23T10:00:00|N/A|N/A||Priority|j\\n8|PENDING|2026-11-23T10:00:00|N/A|N/A||Dependency|k"
    queue = "batch|5\\ndebug|6\\nbatch|7\\nbatch|8"
    cluster = fake(
        squeue=f"case \"$*\" in *sort*) printf '{queue}\\n';; *) printf '{live}\\n';; esac",
        sacct="true",
        scontrol=f"echo 'PrivateData             = {private}'",
    )

    first, second = cluster.states([7, 8]), cluster.states([7, 8])

    assert first[7].queue_position == second[7].queue_position == position
    assert first[8].queue_position is None
    assert ("number 2 in its partition's queue" in waiting_words(first[7])) == (position == 2)


def test_gpus_and_limits_are_read_from_sinfo(fake: Callable[..., CommandLineCluster]) -> None:
    rows = "batch*|1-00:00:00|1-64|100|gpu:h100:8(S:0-1),nvme:1\\nbatch*|1-00:00:00|1-64|20|gpu:h100:8\\nlong|infinite|1-infinite|10|(null)"

    limits = fake(sinfo=f"printf '{rows}\\n'", srun="echo '      --container-image=[USER@]...'").limits()

    assert limits.partitions == ("batch", "long")
    assert (limits.max_nodes, limits.max_time_seconds, limits.gpus_per_node) == (64, 86_400, 8)
    assert limits.has_pyxis


@pytest.mark.parametrize("what", ["partitions", "node"])
def test_a_site_that_hides_nodes_or_partitions_has_unknown_limits(
    what: str, fake: Callable[..., CommandLineCluster]
) -> None:
    """PrivateData; texts of Slurm 22.05. A night would wait for twelve hours, and end."""
    limits = fake(sinfo=f"echo 'slurm_load_{what}: Access/permission denied' >&2; exit 1").limits()

    assert (limits.partitions, limits.max_nodes, limits.max_time_seconds, limits.gres) == ((), None, None, None)
    assert limits.has_partition


def test_resources_are_read_from_sinfo(fake: Callable[..., CommandLineCluster]) -> None:
    rows = "batch*|1-00:00:00|1-64|100|gpu:h100:8(S:0-1,4),nvme:1\\nbatch*|1-00:00:00|1-64|20|shard:4\\nlong|infinite|1|1|mps:1"

    assert fake(sinfo=f"printf '{rows}\\n'").limits().gres == ("gpu", "nvme", "shard")


@pytest.mark.parametrize(
    ("enforced", "allowed", "accounts"),
    [
        ("none", "ALL", None),
        ("none", "perf,llm", ("llm", "perf")),
        ("associations,limits,qos", "ALL", ("here", "llm")),
        ("associations", "llm,perf", ("llm",)),
    ],
)
def test_accounts_are_those_that_slurm_insists_on(
    fake: Callable[..., CommandLineCluster], enforced: str, allowed: str, accounts: tuple[str, ...] | None
) -> None:
    scontrol = f"""case "$*" in *partition*) echo "PartitionName=batch AllowGroups=ALL AllowAccounts={allowed} AllowQos=ALL";;
    *) echo "AccountingStorageEnforce = {enforced}";; esac"""
    sacctmgr = "printf 'llm|\\nhere|batch\\nthere|long\\n'"

    cluster = fake(sinfo="echo 'batch*|1:00|1|1|(null)'", scontrol=scontrol, sacctmgr=sacctmgr)

    limits = CommandLineCluster(cluster.settings.model_copy(update={"account": "llm"})).limits()

    assert limits.accounts == accounts


@pytest.mark.parametrize(("enforced", "accounts"), [("none", None), ("associations", ("llm",))])
def test_without_an_account_in_the_settings_accounts_are_queried_only_where_slurm_insists(
    enforced: str, accounts: tuple[str, ...] | None, fake: Callable[..., CommandLineCluster], tmp_path: Path
) -> None:
    scontrol = f"""case "$*" in *partition*) echo "$*" >> {tmp_path}/asked; echo "PartitionName=batch AllowAccounts=llm,perf";;
    *) echo "AccountingStorageEnforce = {enforced}";; esac"""
    sacctmgr = f"echo sacctmgr >> {tmp_path}/asked; echo 'llm|'"

    limits = fake(sinfo="echo 'batch*|1:00|1|1|(null)'", scontrol=scontrol, sacctmgr=sacctmgr).limits()

    assert limits.accounts == accounts
    assert (tmp_path / "asked").exists() == (accounts is not None)


def test_a_value_of_slurms_configuration_is_that_of_its_very_key(fake: Callable[..., CommandLineCluster]) -> None:
    config = "RequeueExitHold = 3\\nRequeueExit             = 1-9,18 \\nPrologFlags             = \\nEpilog = (null)\\n"

    cluster = fake(scontrol=f"printf '{config}'")

    values = [cluster.configured(key) for key in ("RequeueExit", "RequeueExitHold", "PrologFlags", "Epilog", "Exit")]
    assert values == ["1-9,18", "3", None, None, None]
    assert fake(scontrol="exit 1").configured("RequeueExit") is None


@pytest.mark.slurm
def test_slurmctld_tells_its_configuration(cluster: CommandLineCluster) -> None:
    assert cluster.configured("ClusterName") == "nightbridge"
    assert cluster.configured("RequeueExit") is None


def test_a_site_without_accounting_has_no_accounts(fake: Callable[..., CommandLineCluster]) -> None:
    scontrol = "echo 'AccountingStorageEnforce = associations'"

    limits = fake(sinfo="echo 'batch*|1:00|1|1|(null)'", scontrol=scontrol, sacctmgr="exit 1").limits()

    assert limits.accounts is None


def test_a_machine_without_a_slurm_configuration_is_no_passing_trouble(fake: Callable[..., CommandLineCluster]) -> None:
    sinfo = "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1"

    with pytest.raises(PermanentError, match=r"fake: Slurm is not configured on this machine .* slurm_conf"):
        fake(sinfo=sinfo).limits()


def test_a_slurm_that_keeps_no_accounting_is_refused_before_anything_waits_for_it(
    fake: Callable[..., CommandLineCluster],
) -> None:
    sacct = "echo 'Slurm accounting storage is disabled' >&2; exit 1"

    with pytest.raises(PermanentError, match=r"fake: Slurm keeps no accounting here.* slurmdbd"):
        fake(sinfo="echo 'batch*|1:00|1|1|(null)'", sacct=sacct).limits()


def test_a_controller_that_is_away_is_a_passing_trouble(fake: Callable[..., CommandLineCluster]) -> None:
    with pytest.raises(TransientError, match="Unable to contact slurm controller"):
        fake(sinfo="echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1").limits()


def test_a_host_whose_munged_does_not_listen_is_told_so(fake: Callable[..., CommandLineCluster]) -> None:
    """What sinfo of 22.05 writes 50 seconds after it was called, where a munged that died has left its socket."""
    sinfo = """cat >&2 <<'END'
sinfo: error: If munged is up, restart with --num-threads=10
sinfo: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused
sinfo: error: slurm_send_node_msg: auth_g_create: REQUEST_PARTITION_INFO has authentication error
slurm_load_partitions: Protocol authentication error
END
exit 1"""

    with pytest.raises(TransientError, match=r"Munge encode failed.*Connection refused.*Check munge on this host"):
        fake(sinfo=sinfo).limits()


def test_a_slurm_conf_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "slurm.conf"

    with pytest.raises(InvalidInput, match=f"{missing}: no such file"):
        CommandLineCluster(ClusterSettings(kind="slurm", slurm_conf=missing)).limits()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", StatusUnknown),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (receive failure)",
            StatusUnknown,
        ),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", StatusUnknown),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            JobNotAccepted,
        ),
        (
            'sbatch: error: Munge decode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused\n'
            "sbatch: error: slurm_unpack_received_msg: [[c]:6817] auth_g_verify: RESPONSE_SUBMIT_BATCH_JOB has"
            " authentication error: Unspecified error\nsbatch: error: slurm_unpack_received_msg: [[c]:6817] Protocol"
            " authentication error\nsbatch: error: Batch job submission failed: Unspecified error",
            StatusUnknown,
        ),
        (
            'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file\nsbatch:'
            " error: slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error\nsbatch:"
            " error: Batch job submission failed: Protocol authentication error",
            JobNotAccepted,
        ),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates"
            " accounting/QOS policy (job submit limit, user's size and/or time limits)",
            JobNotAccepted,
        ),
        (
            "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates"
            " accounting/QOS policy (job submit limit, user's size and/or time limits)",
            JobNotAccepted,
        ),
        (
            "sbatch: error: QOSMaxNodePerUserLimit\nsbatch: error: Batch job submission failed: Job violates"
            " accounting/QOS policy (job submit limit, user's size and/or time limits)",
            LaunchRefused,
        ),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", JobNotAccepted),
        (
            "sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
            JobNotAccepted,
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", LaunchRefused),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            LaunchRefused,
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            LaunchRefused,
        ),
        (
            "sbatch: error: You must set a project\nsbatch: error: Batch job submission failed: Unspecified error",
            LaunchRefused,
        ),
        # SLURMCTLD_COMMUNICATIONS_BACKOFF since 23.11, _HARD_DROP since 24.05: the request was not looked at.
        (
            "sbatch: error: Batch job submission failed: Rate limit exceeded, please retry momentarily",
            JobNotAccepted,
        ),
        ("sbatch: error: Batch job submission failed: Rate limit exceeded, please retry later", JobNotAccepted),
        ("sbatch: error: Batch job submission failed: System submissions disabled", JobNotAccepted),
    ],
)
def test_each_refusal_is_of_its_kind(message: str, kind: type[NightbridgeError]) -> None:
    error = refusal_of(message, "job")

    assert type(error) is kind
    assert error.advice
    assert isinstance(error, TransientError) == (kind is not LaunchRefused)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (  # slurm.log_user of job_submit.lua, which returns slurm.ERROR
            "sbatch: error: GPU jobs need a form.\nsbatch: error: See the wiki.\nsbatch: error: Batch job submission"
            " failed: Unspecified error\n",
            "the site refused the job (GPU jobs need a form.; See the wiki.; Batch job submission failed: Unspecified",
        ),
        (  # slurm.log_error of cli_filter.lua
            "sbatch: error: lua: Name a GPU type\nsbatch: error: cli_filter plugin terminated with error\n",
            "the site refused the job (Name a GPU type; cli_filter plugin terminated with error)",
        ),
        ("Our wrapper: no.\nAsk the help desk.", "sbatch refused the job: Our wrapper: no.; Ask the help desk."),
    ],
)
def test_what_a_plugin_of_the_site_says_about_its_refusal_is_shown(message: str, said: str) -> None:
    """As sbatch 22.05 writes it."""
    error = refusal_of(message, "job")

    assert isinstance(error, LaunchRefused)
    assert said in str(error)


@pytest.mark.parametrize(
    ("reason", "kind", "what"),
    [
        ("Unspecified error", LaunchRefused, "the site refused the job"),  # slurm.ERROR
        ("Requested time limit is invalid (missing or exceeds some limit)", LaunchRefused, "the time limit is missing"),
        ("Resource temporarily unavailable", JobNotAccepted, "slurmctld accepts no jobs at the moment"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        "Your account is above its rate limit of GPU-hours",
        "Socket timed out? Connection reset? Not here: use QOS long",
        "The MaxSubmitJobs page of the wiki says why, as does AssocMaxSubmitJobLimit",
        "Book a reservation at https://site/reservation, or ask for an Invalid qos",
    ],
)
def test_a_refusal_goes_by_the_reason_of_slurm_and_not_by_the_words_of_the_site(
    words: str, reason: str, kind: type[NightbridgeError], what: str, fake: Callable[..., CommandLineCluster]
) -> None:
    """As sbatch 22.05 writes it where job_submit.lua calls log_user and returns an error, or a wrapper adds a line."""
    said = f"sbatch: error: {words}\nsbatch: error: Batch job submission failed: {reason}\n"
    tested = fake(sbatch=f"echo '{words}' >&2; echo 'allocation failure: {reason}' >&2; exit 1").test_only("job", ())

    error = refusal_of(said, "job")

    assert type(error) is kind
    assert error.what.startswith(what)
    assert error.what.endswith(f" ({words}; Batch job submission failed: {reason})")
    assert (tested is not None and tested.what.startswith(what)) == (kind is LaunchRefused and "site" not in what)


@pytest.mark.parametrize("words", ["Above the rate limit of this project", "Connection refused by policy"])
def test_what_a_cli_filter_of_the_site_refuses_is_refused_for_good_whatever_it_says(words: str) -> None:
    error = refusal_of(f"sbatch: error: lua: {words}\nsbatch: error: cli_filter plugin terminated with error\n", "job")

    assert type(error) is LaunchRefused
    assert f"the site refused the job ({words}; cli_filter" in str(error)


@pytest.mark.parametrize("answer", ["12;gpu2", "Submitted batch job 12 on cluster gpu2"])
def test_a_job_that_the_site_sends_to_another_cluster_is_cancelled_there_and_refused(
    answer: str, fake: Callable[..., CommandLineCluster], script: Callable[[str], Path], tmp_path: Path
) -> None:
    """What sbatch 22.05 prints where cli_filter.lua sets `clusters`, whatever was given on its command line."""
    config = "echo 'ClusterName             = gpu1'"
    cluster = fake(sbatch=f"echo '{answer}'", scontrol=config, scancel=f'echo "$*" > {tmp_path}/cancelled')

    with pytest.raises(LaunchRefused, match=r"sent job 12 to Slurm's cluster gpu2, .* reach gpu1 here: cancelled"):
        cluster.submit("job-a1", script("true"), [])

    assert (tmp_path / "cancelled").read_text() == "--clusters=gpu2 12\n"
    assert fake(sbatch="echo '12;GPU1'", scontrol=config).submit("job-a1", script("true"), []) == 12


def test_an_sbatch_that_tries_again_at_maxjobcount_is_given_the_time_to_say_that_there_is_no_job() -> None:
    """sbatch.c of 22.05 sleeps 1, 2, ... 15 s between its tries, which takes 120.1 s on a real slurmctld."""
    assert sum(range(1, 16)) + 30 < SUBMIT_TIMEOUT


def test_an_intent_forbids_another_one_for_longer_than_an_sbatch_may_take() -> None:
    """Of a process on another host nothing else tells that its sbatch still tries."""
    assert ClusterSettings().accounting_horizon >= SUBMIT_TIMEOUT + 30


def test_an_sbatch_without_munge_is_not_said_to_lack_slurmctld() -> None:
    error = refusal_of(
        'sbatch: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused\n'
        "sbatch: error: slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error\n"
        "sbatch: error: Batch job submission failed: Protocol authentication error\n",
        "job",
    )

    assert isinstance(error, JobNotAccepted)
    assert "authentication with slurmctld failed (Munge encode failed" in error.happened
    assert "Check munge on this host" in error.advice


def test_a_site_without_a_default_partition_requires_one() -> None:
    error = refusal_of("sbatch: error: Batch job submission failed: No partition specified or system default", "job")

    assert isinstance(error, LaunchRefused)
    assert "partition" in error.advice


@pytest.mark.parametrize(
    ("message", "known"),
    [
        ("allocation failure: Invalid partition name specified", True),
        ("sbatch: error: Invalid --time specification", True),
        ("allocation failure: Requested nodes are busy", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", False),
        ("allocation failure: Something that no one has heard of", False),
        ("", False),
    ],
)
def test_a_test_only_submission_reports_only_what_the_user_has_to_change(
    message: str, known: bool, fake: Callable[..., CommandLineCluster]
) -> None:
    refusal = fake(sbatch=f"echo '{message}' >&2; exit 1").test_only("job", ("--nodes=2",))

    assert (refusal is not None) == known


@pytest.mark.parametrize(
    ("states", "believed"),
    [("idle mixed~ allocated", True), ("idle drained", False), ("down*", False), ("idle*", False), ("", False)],
)
def test_a_test_only_error_about_nodes_counts_only_where_all_of_them_are_up(
    states: str, believed: bool, fake: Callable[..., CommandLineCluster]
) -> None:
    message = "allocation failure: Requested node configuration is not available"
    cluster = fake(sbatch=f"echo '{message}' >&2; exit 1", sinfo=f"printf '%s\\n' {states}")

    assert (cluster.test_only("job", ("--nodes=2",)) is not None) == believed


def test_nodes_that_came_back_while_the_trial_was_judged_refuse_nothing(
    fake: Callable[..., CommandLineCluster], tmp_path: Path
) -> None:
    message = "allocation failure: Requested node configuration is not available"
    once = f"test -e {tmp_path}/back && exit 0; touch {tmp_path}/back; echo '{message}' >&2; exit 1"

    assert fake(sbatch=once, sinfo="echo idle").test_only("job", ("--nodes=2",)) is None


def test_a_trial_submits_nothing_and_is_silent_about_what_slurm_would_take(
    fake: Callable[..., CommandLineCluster],
) -> None:
    cluster = fake(
        sbatch='case "$*" in --test-only*--nodes=2*--wrap=true) echo "Job 1 to start" >&2;; *) exit 1;; esac'
    )

    assert cluster.test_only("job", ("--nodes=2",)) is None


# --- texts -----------------------------------------------------------------------------------------------------------


def test_of_a_requeued_job_the_last_submission_counts() -> None:
    rows = parse_sacct(
        "7|NODE_FAIL|2026-11-20T22:00:00|2026-11-20T22:01:00|2026-11-20T22:05:00|node1|None|1:0|run-a1\n"
        "7|COMPLETED|2026-11-20T22:06:00|2026-11-20T22:07:00|2026-11-20T22:30:00|node2|None|0:0|run-a1\n"
    )

    assert newest(rows)[7].state is JobState.COMPLETED


@pytest.mark.parametrize(
    ("said", "alone"),
    [
        ("PREEMPTED", JobState.COMPLETING),
        ("NODE_FAIL", JobState.COMPLETING),
        ("BOOT_FAIL", JobState.COMPLETING),
        ("CANCELLED", JobState.COMPLETING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("FAILED", JobState.FAILED),
        ("TIMEOUT", JobState.TIMEOUT),
    ],
)
def test_accounting_alone_ends_no_job_that_slurmctld_may_have_requeued_or_lost(
    said: str, alone: JobState, fake: Callable[..., CommandLineCluster]
) -> None:
    """As a real slurmctld 22.05 leaves it that is stopped right after it has requeued a job."""
    sacct = f"echo '7|{said}|2026-11-27T10:17:52|2026-11-27T10:17:53|2026-11-27T10:18:02|node1|None|0:0|run-a1'"

    without = fake(squeue="echo 'Unable to contact slurm controller' >&2; exit 1", sacct=sacct).states([7])[7]
    confirmed = fake(squeue="exit 0", sacct=sacct).states([7])[7]

    assert without.state is alone
    assert confirmed.state is JobState[said.split()[0]]


def test_an_exit_code_is_believed_once_accounting_knows_when_the_job_ended() -> None:
    (row,) = parse_sacct("9|FAILED|2026-11-22T22:26:58|2026-11-22T22:26:59|Unknown|node[1-2]|None|0:0|run-a1\n")

    assert (row.state, row.exit_code, row.signal) == (JobState.FAILED, None, None)


def test_banners_array_tasks_and_short_lines_are_no_jobs() -> None:
    text = "Welcome|to|the|cluster\n7_3|RUNNING|2026-11-20T22:00:00|N/A|N/A|||task\n12+0|RUNNING|N/A|N/A|N/A|n1|None|het|leader\n"

    rows = parse_squeue(text)

    assert [(row.job_id, row.name) for row in rows] == [(12, "het|leader")]


def test_slurmctld_decides_the_state_and_accounting_adds_what_it_knows() -> None:
    live = {
        1: JobStatus(job_id=1, name="a", state=JobState.PENDING),
        2: JobStatus(job_id=2, name="b", state=JobState.FAILED),
    }
    past = {
        1: JobStatus(job_id=1, name="a", state=JobState.NODE_FAIL, exit_code=1),
        2: JobStatus(job_id=2, name="b", state=JobState.FAILED, exit_code=9),
    }

    merged = merge(live, past)

    assert merged[1].state is JobState.PENDING
    assert merged[2].exit_code == 9


def test_a_job_that_the_site_named_otherwise_has_our_name_and_accountings_end(
    fake: Callable[..., CommandLineCluster],
) -> None:
    """squeue and sacct of 22.05 about a job that job_submit.lua has named, cancelled by uid 1000."""
    times = "2026-11-27T10:17:52|2026-11-27T10:17:53|2026-11-27T10:18:02|node1|None"
    script = "/ws/runs/llama-2026-11-21-0123456789/a2/job.sh"
    cluster = fake(
        squeue=f"printf '7|CANCELLED|{times}|acct_llama\\t{script}\\n'",
        sacct=f"echo '7|CANCELLED by 1000|{times}|0:15|acct_llama'",
    )

    status = cluster.states([7])[7]

    assert (status.name, status.cancelled_by) == ("llama-2026-11-21-0123456789-a2", "1000")
    assert [job.job_id for job in cluster.find("llama-2026-11-21-0123456789-a2").jobs] == [7]


def test_an_ended_job_is_found_though_another_one_has_its_id_by_now(fake: Callable[..., CommandLineCluster]) -> None:
    """Of the same user, after MaxJobId."""
    cluster = fake(
        squeue="echo '7|RUNNING|2026-11-28T10:00:00|2026-11-28T10:00:01|N/A|node1|None|theirs'",
        sacct="echo '7|FAILED|2026-11-27T10:00:00|2026-11-27T10:01:00|2026-11-27T11:00:00|node1|None|3:0|ours-a1'",
    )

    assert [(job.job_id, job.exit_code) for job in cluster.find("ours-a1").jobs] == [(7, 3)]


@pytest.mark.parametrize(("minutes", "state"), [(31, JobState.FAILED), (5, JobState.COMPLETING)])
def test_a_node_that_is_stuck_in_cleaning_up_does_not_hold_a_job_whose_end_accounting_has(
    minutes: int, state: JobState, fake: Callable[..., CommandLineCluster], tmp_path: Path
) -> None:
    end = f"{datetime.now(UTC) - timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%S}"
    live = f"7|COMPLETING|2026-11-23T10:00:00|2026-11-23T10:01:00|{end}|node1|NonZeroExitCode|j"
    past = f"7|FAILED|2026-11-23T10:00:00|2026-11-23T10:01:00|{end}|node1|None|3:0|j"
    cluster = fake(squeue=f"echo '{live}'", sacct=f"echo >> {tmp_path}/asked; echo '{past}'")

    status = cluster.states([7])[7]

    assert (status.state, status.exit_code) == (state, 3 if state is JobState.FAILED else None)
    assert (tmp_path / "asked").exists() == (state is JobState.FAILED)
    assert cluster.find("j").jobs[0].state is state


def test_the_module_needs_no_heavy_imports() -> None:
    code = "import sys, nightbridge.slurm.sbatch_shim; print([m for m in ('pandas', 'numpy', 'boto3', 'prefect', 'pyarrow') if m in sys.modules])"

    import sys

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert out == "[]\n"


def test_the_settings_gpus_of_a_node_win_over_sinfos(fake: Callable[..., CommandLineCluster]) -> None:
    cluster = fake(sinfo="echo 'batch*|1-00:00:00|1-64|100|gpu:h100:8'", srun="exit 0")

    limits = CommandLineCluster(cluster.settings.model_copy(update={"gpus_per_node": 4})).limits()

    assert (limits.gpus_per_node, limits.configured_gpus_per_node) == (4, 4)
    assert cluster.limits().configured_gpus_per_node is None
