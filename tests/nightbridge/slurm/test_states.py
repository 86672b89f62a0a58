"""Slurm's state words, as the commands of several versions write them."""

import pytest

from nightbridge.models import JobState, JobStatus
from nightbridge.slurm.states import (
    ACTIVE,
    TERMINAL,
    hopeless_advice,
    parse_cancelled_by,
    parse_sacct,
    parse_squeue,
    parse_state,
    waiting_words,
)


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.UNKNOWN])
def test_every_full_word_is_itself(state: JobState) -> None:
    assert parse_state(state.value) is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED+", JobState.CANCELLED),
        ("CANCELLED by 1000", JobState.CANCELLED),
        (" RUNNING ", JobState.RUNNING),
        ("running", JobState.RUNNING),
        ("RESV_DEL_HOLD", JobState.PENDING),
        ("REQUEUE_FED", JobState.REQUEUED),
        ("EXPEDITING", JobState.REQUEUED),
    ],
)
def test_decorated_and_rare_words_are_understood(text: str, state: JobState) -> None:
    assert parse_state(text) is state


@pytest.mark.parametrize("text", ["", "TELEPORTED", "COMP+", "OUT_OF_ME+", "42", "COMPLET"])
def test_an_unknown_word_never_ends_a_job(text: str) -> None:
    assert parse_state(text) is JobState.UNKNOWN
    assert parse_state(text) not in TERMINAL


def test_no_state_is_both_terminal_and_active() -> None:
    assert not TERMINAL & ACTIVE


def test_who_cancelled_a_job_is_read_from_sacct() -> None:
    assert parse_cancelled_by("CANCELLED by 1000") == "1000"
    assert parse_cancelled_by("CANCELLED") == ""


@pytest.mark.parametrize(
    "reason",
    [
        "(PartitionConfig)", "BadConstraints", "ReservationInvalid", "QOSMaxGRESPerJob", "AssocMaxGRESPerNode",
        "QOSMaxMemoryPerJob", "AssocMaxCpuPerJobLimit", "QOSMinGRES", "QOSMinCpuNotSatisfied", "MaxMemPerLimit",
    ],
)  # fmt: skip
def test_a_reason_that_no_waiting_clears_has_advice(reason: str) -> None:
    assert hopeless_advice(reason) is not None


@pytest.mark.parametrize(
    "reason",
    [
        "Resources", "(ReqNodeNotAvail, Reserved for maintenance)", "JobHeldUser", "QOSMaxGRESPerUser",
        "QOSMaxJobsPerUserLimit", "AssocGrpGRES", "MaxGRESPerAccount", "Licenses", "PartitionDown", "",
    ],
)  # fmt: skip
def test_a_reason_that_may_clear_is_waited_for(reason: str) -> None:
    assert hopeless_advice(reason) is None


def test_a_stored_state_is_read_under_its_old_name() -> None:
    stored = '{"job_id": 1, "state": "UNHEARD"}'

    assert JobStatus.model_validate_json(stored).state is JobState.UNKNOWN
    assert JobStatus.model_validate({"job_id": 1, "state": "UNHEARD"}).state is JobState.UNKNOWN
    with pytest.raises(ValueError, match="state"):
        JobStatus.model_validate({"job_id": 1, "state": "TELEPORTED"})


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "JobHeldUser, held by its user: `scontrol release 99`"),
        (
            "(ReqNodeNotAvail, UnavailableNodes:node2)",
            "a node that it needs is busy, down, drained or reserved: `sinfo -R`",
        ),
        ("QOSGrpJobsLimit", "a limit of the QOS is used up by other jobs: `scontrol show assoc_mgr flags=qos`"),
        ("AssocGrpGRES", "a limit of the account is used up by other jobs: `scontrol show assoc_mgr`"),
        ("PartitionNodeLimit", "Request a number of nodes that the partition allows."),
        ("SomethingNew", "SomethingNew"),
        ("", "no reason given yet"),
    ],
)
def test_a_pending_job_says_why_what_to_type_and_when_it_starts(reason: str, words: str) -> None:
    (row,) = parse_squeue(f"99|PENDING|2026-11-23T10:00:00|2026-11-23T11:30:00|N/A||{reason}|job")

    assert words in waiting_words(row)
    assert waiting_words(row).endswith("Slurm expects its start at 11:30 UTC")


def test_a_job_whose_reason_has_several_lines_is_known_like_any_other() -> None:
    row = "{}|PENDING|2026-11-23T10:00:00|N/A|N/A||{}|job"
    listing = [
        "maintenance on Friday",
        row.format(98, "Priority"),
        row.format(99, "burst_buffer/lua: no space:\n\n5 left"),
    ]

    found = parse_squeue("\n".join([*listing, row.format("100_1", "a task\nof an array"), row.format(101, ""), "bye"]))

    assert [(job.job_id, job.name) for job in found] == [(98, "job"), (99, "job"), (101, "job")]
    assert found[1].reason.startswith("burst_buffer/lua: no space:")
    assert "the burst buffer failed" in waiting_words(found[1])


def test_the_reason_of_a_wait_is_gone_once_the_job_has_nodes() -> None:
    line = "99|COMPLETED|2026-11-23T10:00:00|2026-11-23T10:01:00|2026-11-23T10:02:00|node2|{}|0:0|job"

    words = ("JobHeldUser", "QOSGrpJobsLimit", "NodeDown")
    reasons = [row.reason for word in words for row in parse_sacct(line.format(word))]

    assert reasons == ["", "", "NodeDown"]
