"""The command line: what it prints where, how it ends, and how little it imports."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from nightbridge.cli import file_checks
from nightbridge.cli import main as cli
from nightbridge.errors import PermanentError, TransientError
from nightbridge.models import ClusterSettings, NightReport, Verdict, VerdictStatus
from nightbridge.rules import PROFILES
from nightbridge.rules import config_container as containers
from nightbridge.slurm.attempt_files import open_attempt

EXAMPLES = Path(__file__).parents[3] / "conf" / "examples"
NIGHTLY, TEST = str(EXAMPLES / "nightly.toml"), str(EXAMPLES / "llama3_8b.toml")

BROKEN = """name = "broken"
test_template_name = "MegatronBridge"
[[git_repos]]
url = "https://example.org/Megatron-Bridge.git"
commit = "v0.4.2"
[cmd_args]
gpu_type = "h100"
num_gpus = 8
container_image = "none"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
"""


@pytest.fixture
def nightbridge(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def _run(*arguments):
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return code, captured.out, captured.err

    return _run


@pytest.fixture
def broken(tmp_path):
    def _write(lines):
        path = tmp_path / "broken.toml"
        path.write_text(BROKEN + lines)
        return str(path)

    return _write


# --- the program itself ----------------------------------------------------------------------------------------------


def test_version_is_the_installed_one(nightbridge):
    assert nightbridge("--version") == (0, f"nightbridge {importlib.metadata.version('nightbridge')}\n", "")


@pytest.mark.parametrize("command", [(), ("validate",), ("accept",)])
def test_h_is_short_for_help(nightbridge, command):
    assert nightbridge(*command, "-h") == nightbridge(*command, "--help")


def test_a_shell_completes_commands_and_their_options():
    def completions(words, index):
        request = {"_NIGHTBRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        program = Path(sys.executable).with_name("nightbridge")
        finished = subprocess.run([program], env=os.environ | request, capture_output=True, text=True, check=True)
        return finished.stdout.split()

    assert completions("nightbridge hist", 1) == ["history"]
    assert completions("nightbridge validate --pin", 2) == ["--pinned"]


# --- validate --------------------------------------------------------------------------------------------------------


def test_validate_accepts_the_samples(nightbridge):
    code, out, _ = nightbridge("validate", NIGHTLY, TEST)

    assert code == 0
    assert out.count(": ok") == 4


def test_validate_tells_every_violation_of_every_file(nightbridge, broken):
    code, out, _ = nightbridge("validate", broken("tpp = 1\n"), "missing.toml", TEST)

    assert code == 2
    assert "cmd_args.tpp: unknown key" in out
    assert "missing.toml: no such file" in out
    assert "llama3_8b_h100: ok" in out


def test_validate_checks_rules_as_well_as_keys(nightbridge, broken):
    code, out, _ = nightbridge("validate", broken("tp = 3\ngb = 0\n"))

    assert code == 2
    assert "error [gpus-divide]" in out
    assert "error [sizes-positive]" in out


def test_a_folder_of_tests_that_is_not_there_is_told(nightbridge):
    code, out, _ = nightbridge("validate", TEST, "--tests-dir", "nowhere")

    assert code == 2
    assert "nowhere: no such folder" in out


def test_validate_prints_one_json_document_and_nothing_else(nightbridge, broken):
    code, out, _ = nightbridge("validate", "--json", broken("tp = 3\n"), TEST, "missing.toml")

    document = json.loads(out)
    assert code == 2
    assert document["valid"] is False
    broken_file, sample, missing = document["files"]
    assert broken_file["tests"][0]["findings"][0]["rule"] == "gpus-divide"
    assert sample["valid"] is True
    assert "no such file" in missing["error"]


def test_validate_asks_the_cluster_only_when_one_is_named(nightbridge, monkeypatch):
    from nightbridge.models import ClusterLimits
    from nightbridge.slurm import factory

    class Opened:
        def limits(self):
            return ClusterLimits(has_pyxis=True, max_nodes=1)

    monkeypatch.setattr(factory, "open_cluster", lambda settings, workspace: Opened())

    without, _, _ = nightbridge("validate", NIGHTLY)
    code, out, _ = nightbridge("validate", NIGHTLY, "--cluster", "slurm")

    assert without == 0
    assert code == 2
    assert "error [nodes-allowed] num_gpus 16 need 2 nodes" in out


def test_validate_says_how_many_points_of_a_sweep_are_skipped_and_why(nightbridge, broken):
    some, out, _ = nightbridge("validate", broken("tp = [1, 2, 3]\n"))
    none, refused, _ = nightbridge("validate", broken("tp = [3, 5]\n"))

    assert (some, none) == (0, 2)
    assert "warning [gpus-divide] 1 of 3 points of the sweep are skipped" in out
    assert "error [gpus-divide] 2 of 2 points" in refused


def test_validate_takes_the_configuration_that_a_run_has_dumped(nightbridge, tmp_path):
    path = tmp_path / "ConfigContainer.yaml"
    path.write_text("model: {num_layers: 32}\ntrain: {train_iters: 50, global_batch_size: 16, micro_batch_size: 1}\n")

    sound, out, _ = nightbridge("validate", str(path), "--gpus", "8")
    changed, found, _ = nightbridge("validate", str(path), "--gpus", "6", "--override", "train.train_iters=0", "--json")
    unknown, told, _ = nightbridge("validate", str(path), "--override", "train.iters=0")

    assert (sound, changed, unknown) == (0, 2, 2)
    assert "ConfigContainer: ok" in out
    rules = {finding["rule"] for finding in json.loads(found)["files"][0]["tests"][0]["findings"]}
    assert rules == {"container-eval-batch", "container-train-batch", "container-no-training"}
    assert "'train.iters=0' does not name a key" in told


# --- rules -----------------------------------------------------------------------------------------------------------


def test_rules_lists_every_rule_that_validate_may_name(nightbridge):
    code, out, _ = nightbridge("rules", "--json")

    listed = {rule["id"] for rule in json.loads(out)["rules"]}
    assert code == 0
    assert {rule.id for profile in PROFILES.values() for rule in profile} <= listed
    assert {rule.id for rule in (*containers.RULES, *containers.MISSED)} <= listed
    assert {"configuration", "pinned-code", "sweep-size"} <= listed


def test_every_rule_has_a_reason_and_a_source(nightbridge):
    rules = json.loads(nightbridge("rules", "--json")[1])["rules"]

    assert [rule["id"] for rule in rules if not (rule["reason"].endswith(".") and rule["source"])] == []


def test_rules_shows_one_rule_in_full(nightbridge):
    code, out, _ = nightbridge("rules", "qwen3-tokenizer")
    listing = nightbridge("rules")[1]

    assert code == 0
    assert re.search(r"severity +error\n", out)
    assert re.search(r"versions +from v0\.4\.0\n", out)
    assert re.search(r"source +Megatron-Bridge", out)
    assert "qwen3-tokenizer" in listing


def test_a_rule_that_does_not_exist_is_refused_with_the_next_best(nightbridge):
    code, _, told = nightbridge("rules", "gpu-divides")

    assert (code, told) == (2, "nightbridge: gpu-divides: no such rule. Did you mean gpus-divide?\n")


# --- render ----------------------------------------------------------------------------------------------------------


def test_render_shows_the_command_line_of_every_run_and_masks_secrets(nightbridge):
    code, out, _ = nightbridge("render", NIGHTLY, "--system", str(EXAMPLES / "site.toml"))

    assert code == 0
    assert out.count("scripts/performance/setup_experiment.py -a llm-perf -p batch") == 3
    assert "export HF_TOKEN=********" in out


def test_render_shows_the_batch_script_of_a_workload_without_a_launcher(nightbridge):
    code, out, _ = nightbridge("render", str(EXAMPLES / "hetero" / "9_nodes.toml"))

    assert code == 0
    assert "train.sh:\n#!/bin/bash\n#SBATCH --nodes=9\n" in out
    assert "examples/mimo/pretrain_mimo.py --encoder-tp 1 --encoder-dp 8 --llm-tp 2" in out


def test_render_prints_one_json_document(nightbridge):
    code, out, _ = nightbridge("render", "--json", NIGHTLY)

    runs = json.loads(out)["runs"]
    assert code == 0
    assert [run["nodes"] for run in runs] == [1, 1, 2]
    assert runs[2]["environment"]["HF_TOKEN"] == "********"
    assert runs[2]["secret_environment"] == {"HF_TOKEN": {"source": "env", "name": "HF_TOKEN"}}


def test_render_never_shows_a_token_that_stands_in_the_file(nightbridge, broken):
    code, out, err = nightbridge("render", broken('hf_token = "hf_verysecret"\n'))

    assert code == 0
    assert "verysecret" not in out + err
    assert "cmd_args.hf_token" in err


def test_render_shows_the_valid_runs_and_says_which_are_not(nightbridge, broken):
    code, out, err = nightbridge("render", "--json", broken("tp = 3\n"))

    assert code == 2
    assert json.loads(out)["runs"] == []
    assert "gpus-divide" in err


# --- events, verify, fetch -------------------------------------------------------------------------------------------


@pytest.fixture
def event_folder(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for step in (1, 2, 3):
        value = Summary.Value(tag="lm loss", simple_value=10.0 / step)
        writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[value])))
    writer.close()
    return str(tmp_path / "tb")


def test_events_prints_one_line_for_each_tag(nightbridge, event_folder):
    code, out, _ = nightbridge("events", event_folder)

    assert code == 0
    assert out.splitlines()[1] == "lm loss\t3\t1\t3\t3.33333"


def test_events_counts_what_is_no_scalar(nightbridge, event_folder):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(event_folder)
    values = [Summary.Value(tag="weights", histo=HistogramProto()), Summary.Value(tag="seen", image=Summary.Image())]
    for value in (*values, values[0]):
        writer.add_event(Event(summary=Summary(value=[value])))
    writer.close()

    code, out, err = nightbridge("events", event_folder)

    assert (code, len(out.splitlines())) == (0, 2)
    assert "not scalars, left out: 2 histogram, 1 image" in err


def test_events_writes_the_table_as_parquet(nightbridge, event_folder, tmp_path):
    import pandas as pd

    code, out, _ = nightbridge("events", event_folder, "--out", str(tmp_path / "x.parquet"))

    assert (code, out) == (0, "")
    assert list(pd.read_parquet(tmp_path / "x.parquet")["step"]) == [1, 2, 3]


def test_events_into_a_place_that_cannot_be_written_say_so(nightbridge, event_folder, tmp_path):
    (tmp_path / "file").write_text("")

    code, _, err = nightbridge("events", event_folder, "--out", str(tmp_path / "file" / "x.parquet"))

    assert code == 2
    assert "cannot be written" in err


def test_events_without_any_say_so(nightbridge, tmp_path):
    code, _, err = nightbridge("events", str(tmp_path))

    assert code == 2
    assert "no TensorBoard scalars" in err


def test_events_of_a_missing_folder_say_so(nightbridge):
    code, _, err = nightbridge("events", "nowhere")

    assert (code, "nowhere: no such file or folder" in err) == (2, True)


@pytest.mark.parametrize("command", [["verify"], ["fetch", "dest"], ["compare"], ["accept", "--why", "known"]])
def test_a_run_that_was_never_stored_is_named(nightbridge, tmp_path, command):
    key = "test-2026-11-21-0123456789"

    code, _, err = nightbridge(command[0], key, *command[1:], "--workspace", str(tmp_path / "ws"))

    assert code == 2
    assert key in err


@pytest.mark.parametrize("command", [["demo"], ["demo", "--prepare"]])
def test_a_workspace_in_the_place_of_a_file_is_told_in_one_line(nightbridge, tmp_path, command):
    file = tmp_path / "file"
    file.write_text("kept")

    code, out, err = nightbridge(*command, "--workspace", str(file))

    assert (code, out) == (4, "")
    assert err == (f"nightbridge: {file}/demo-prefect: Not a directory. Check the path, and this user's rights to it\n")
    assert file.read_text() == "kept"


def test_an_empty_night_is_refused_and_not_a_new_one(nightbridge):
    code, _, err = nightbridge("run", TEST, "--night", "")

    assert code == 2
    assert "not a night id" in err


def test_a_run_without_a_log_says_so(nightbridge, tmp_path):
    workspace = tmp_path / "ws"
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{workspace}"\n')
    attempt = open_attempt(workspace, "test-2026-11-21-0123456789", ClusterSettings())

    code, out, err = nightbridge("logs", attempt.run_key, "--system", str(site))

    assert (code, out) == (0, "")
    assert err == f"{attempt.name} has no log yet\n"


# --- how a command ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (PermanentError("no such thing", thing="x", advice="Look"), 4, "nightbridge: x: no such thing. Look"),
        (TransientError("nobody answers", thing="slurm"), 4, "nightbridge: slurm: nobody answers"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("defect"), 4, "internal error: ValueError: defect"),
        (PermissionError(13, "Permission denied", "/x"), 4, "nightbridge: /x: Permission denied. Check the path"),
    ],
)
def test_every_error_is_one_message_and_an_exit_code(nightbridge, monkeypatch, error, code, told):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(file_checks, "check_file", fail)

    ended, out, err = nightbridge("validate", TEST)

    assert (ended, out) == (code, "")
    assert told in err


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["validate"], ["render", "--frob", "x"]])
def test_a_wrong_command_line_is_invalid_input(nightbridge, arguments):
    code, out, err = nightbridge(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith("nightbridge: ")
    assert len(err.splitlines()) == 1


# --- start-up --------------------------------------------------------------------------------------------------------

HEAVY = ("prefect", "pandas", "boto3", "numpy", "matplotlib", "pyarrow", "tenacity", "jinja2", "flows")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["validate", "--help"], ["validate", NIGHTLY, TEST], ["render", TEST]]
)
def test_commands_that_must_start_fast_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom nightbridge.cli import main as cli\n"
        f"ended = cli.run({arguments!r})\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else ended)"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_entry_point_ends_with_the_commands_exit_code():
    ended = subprocess.run(
        [sys.executable, "-m", "nightbridge", "validate", "nowhere.toml"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.returncode == 2
    assert "nowhere.toml: no such file" in ended.stdout


# --- JUnit XML -------------------------------------------------------------------------------------------------------


@pytest.fixture
def night_of(monkeypatch):
    """A night that ends with this verdict, without running anything."""

    def end_with(status):
        verdict = Verdict(run_key="llama3-8b-n1-0123456789", test_id="llama3-8b", night="n1", status=status)
        report = NightReport(scenario="nightly", night="n1", verdicts=(verdict,), report="file:///reports/n1.html")
        flows = SimpleNamespace(nightly_regression=lambda *_given, **_named: report)
        monkeypatch.setitem(sys.modules, "nightbridge.flows", flows)

    return end_with


@pytest.mark.parametrize(
    ("status", "code", "failures"), [(VerdictStatus.PASSED, 0, "0"), (VerdictStatus.REGRESSED, 1, "1")]
)
def test_run_writes_the_verdicts_for_a_ci_system(nightbridge, night_of, tmp_path, status, code, failures):
    night_of(status)

    ended, out, _ = nightbridge("run", TEST, "--night", "n1", "--json", "--junit", "verdicts.xml")

    suite = ElementTree.parse(tmp_path / "verdicts.xml").getroot()[0]
    assert (ended, suite.get("name"), suite.get("failures")) == (code, "nightly", failures)
    assert json.loads(out)["exit_code"] == code


def test_a_junit_file_without_a_folder_is_refused_before_the_night_begins(nightbridge, monkeypatch):
    def never(*_given, **_named):
        raise AssertionError("the night began")

    monkeypatch.setitem(sys.modules, "nightbridge.flows", SimpleNamespace(nightly_regression=never))

    code, _, err = nightbridge("run", TEST, "--night", "n1", "--junit", "no/such/folder.xml")

    assert code == 2
    assert "no/such/folder.xml: its folder does not exist" in err


def test_a_junit_file_that_cannot_be_written_is_told_after_the_verdicts(nightbridge, night_of, tmp_path):
    night_of(VerdictStatus.PASSED)
    (tmp_path / "taken").mkdir()

    code, out, err = nightbridge("run", TEST, "--night", "n1", "--junit", "taken")

    assert code == 2
    assert "passed" in out
    assert "taken: cannot be written" in err


# --- watchdog --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_scheduled(monkeypatch):
    """No Prefect server, wherever this machine has one."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def night_began(tmp_path):
    """A night by schedule of one test, an hour ago; returns what records its end."""
    from datetime import timedelta

    from nightbridge.models import Site, StoreSettings, utc_now
    from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
    from nightbridge.store.factory import open_store

    store = open_store(StoreSettings(url=f"file://{tmp_path}/.nightbridge/store"))
    begun = utc_now() - timedelta(hours=1)
    record_start(
        store,
        NightStart(
            night="2026-11-21",
            scenario="practice",
            cluster="local",
            workspace=Site(workspace=tmp_path / ".nightbridge").workspace,
            begun_at=begun,
            slot=begun,
            tests=(NightTest(test_id="llama", run_key="llama-2026-11-21-0123456789"),),
        ),
    )
    (tmp_path / ".nightbridge" / "runs").mkdir()

    def _end(status):
        verdict = Verdict(run_key="llama-2026-11-21-0123456789", test_id="llama", night="2026-11-21", status=status)
        record_end(store, NightReport(scenario="practice", night="2026-11-21", verdicts=(verdict,), report="r.html"))

    return _end


@pytest.fixture
def by_now():
    """`--by` and `--timezone` of a deadline that has just passed."""
    from nightbridge.models import utc_now

    return ("--by", f"{utc_now():%H:%M}", "--timezone", "UTC")


@pytest.mark.usefixtures("nobody_scheduled")
class TestWatchdog:
    def test_says_that_every_verdict_is_there(self, nightbridge, night_began, by_now):
        night_began(VerdictStatus.FAILED)

        code, out, err = nightbridge("watchdog", *by_now)

        assert (code, err) == (0, "")
        assert out == ("practice, night 2026-11-21: 1 verdict\n  bad verdicts: llama failed\n  report: r.html\n")

    def test_says_nothing_then_when_it_is_to_be_quiet(self, nightbridge, night_began, by_now):
        night_began(VerdictStatus.PASSED)

        assert nightbridge("watchdog", *by_now, "--quiet") == (0, "", "")

    def test_says_which_verdict_is_missing_and_why_however_quiet(self, nightbridge, night_began, by_now):
        code, out, err = nightbridge("watchdog", *by_now, "--quiet")

        assert code == 4
        assert "practice, night 2026-11-21: 1 of 1 verdict missing\n  llama: crashed: " in out
        assert "no alert was sent: the site has no [notify]" in err

    def test_prints_one_json_document(self, nightbridge, night_began, by_now):
        code, out, _ = nightbridge("watchdog", *by_now, "--json")

        document = json.loads(out)
        assert code == document["exit_code"] == 4
        assert document["nights"][0]["missing"][0]["cause"] == "crashed"

    def test_alarms_by_mail_and_webhook_once_each(self, nightbridge, night_began, by_now, tmp_path, monkeypatch):
        from tests.real.notify_servers import mail_server, webhook_server

        with mail_server() as mail, webhook_server("/planted-token") as hook:
            monkeypatch.setenv("HOOK", hook.url)
            (tmp_path / "site.toml").write_text(
                f'[notify]\nsmtp_host = "{mail.host}"\nsmtp_port = {mail.port}\nsmtp_security = "none"\n'
                'mail_to = ["night@example.org"]\nwebhook = "env:HOOK"\n'
            )
            code, out, err = nightbridge("watchdog", *by_now, "--system", "site.toml")

        (message,), (body,) = mail.received, map(json.loads, hook.received)
        assert code == 4
        assert message["Subject"] == "nightbridge: 1 verdict missing: practice, night 2026-11-21"
        assert "  llama: crashed: " in message.get_content()
        assert (body["night"], body["missing"][0]["test_id"]) == ("2026-11-21", "llama")
        assert body["text"].replace("\n", "") in message.get_content().replace("\r\n", "").replace("\n", "")
        assert "sent: mail to night@example.org\nsent: webhook\n" in err
        assert "planted-token" not in out + err

    def test_tells_nobody_of_a_good_night(self, nightbridge, night_began, by_now, tmp_path):
        from tests.real.notify_servers import webhook_server

        night_began(VerdictStatus.REGRESSED)
        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, _, _ = nightbridge("watchdog", *by_now, "--system", "site.toml")

        assert (code, hook.received) == (0, [])

    def test_an_alarm_that_cannot_be_sent_is_an_error_after_what_was_seen(
        self, nightbridge, night_began, by_now, tmp_path
    ):
        (tmp_path / "site.toml").write_text('[notify]\nwebhook = "env:NOWHERE"\n')

        code, out, err = nightbridge("watchdog", *by_now, "--system", "site.toml")

        assert code == 4
        assert "1 of 1 verdict missing" in out
        assert "NOWHERE: secret not found in env" in err

    def test_sends_a_trial_notice(self, nightbridge, tmp_path):
        from tests.real.notify_servers import webhook_server

        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, _, err = nightbridge("watchdog", "--by", "08:00", "--system", "site.toml", "--send-test")

        assert (code, len(hook.received)) == (0, 1)
        assert "sent: webhook" in err

    def test_a_trial_notice_to_nobody_is_invalid(self, nightbridge):
        code, _, err = nightbridge("watchdog", "--by", "08:00", "--send-test")

        assert code == 2
        assert "[notify]" in err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--by", "8 o'clock"), "8 o'clock: not a time of day. Write hours and minutes, as 08:00"),
            (("--by", "08:00", "--timezone", "Berlin"), "Berlin: no such time zone. Write it as Europe/Berlin"),
            (("--by", "08:00", "--days", "0"), "'--days': Input should be greater than or equal to 1"),
            ((), "Missing option '--by'"),
        ],
    )
    def test_refuses_what_it_cannot_read(self, nightbridge, arguments, told):
        code, _, err = nightbridge("watchdog", *arguments)

        assert code == 2
        assert told in err

    def test_a_file_that_cannot_be_read_is_invalid_and_told(self, nightbridge, tmp_path):
        from tests.real.notify_servers import webhook_server

        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, out, _ = nightbridge("watchdog", "gone.toml", "--by", "08:00", "--system", "site.toml")

        assert code == 2
        assert "gone.toml: no such file" in out
        assert "gone.toml" in hook.received[0].decode()
