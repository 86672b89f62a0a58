"""A month of the practice workload: a small slow-down at a known commit among many. Is it found, and named?

Every night runs through the whole pipeline on this machine. Each brings one harmless commit, except one that brings
64 at once, of which one makes training 3 % slower. Printed: false alarms before it, nights until it was found, and what
bisect says between the last good and the first bad pin.

    .venv/bin/python benchmarks/practice_month.py [NIGHTS] [COMMITS] [PER CENT] [FOLDER]

The same FOLDER goes on with a month that was interrupted.
"""

import os
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(nights: int, commits: int, per_cent: float, folder: Path) -> int:
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_HOME=str(folder / "prefect"),
        PREFECT_LOGGING_LEVEL="ERROR",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
    )
    from flows import bisect_regression
    from nightbridge.config.sites import plain_site
    from nightbridge.practice.repositories import commit_many, make_practice_repositories
    from nightbridge.regression.bisect_result import result_lines
    from nightbridge.regression.stored import history_of
    from nightbridge.regression.trend import trend_lines
    from nightbridge.store.objects import open_store

    repositories = make_practice_repositories(folder / "practice")
    site_file, test_file = _files(folder, repositories.bridge_url)
    site = plain_site(str(site_file))[0]
    store = open_store(site.store_settings)
    planted_night, planted_place = nights - 6, commits * 5 // 8
    first = date(2026, 10, 1)
    began = time.monotonic()
    alarms, found, slow = [], None, _kept(folder / "slow")
    for number in range(nights):
        night = (first + timedelta(days=number)).isoformat()
        if not (folder / night).exists():
            if number == planted_night:
                slower = {planted_place: {"step_time_factor": 1 + per_cent / 100}}
                slow = commit_many(repositories, [f"Change {n} of {commits}" for n in range(commits)], slower)[
                    planted_place
                ]
                (folder / "slow").write_text(slow)
            else:
                commit_many(repositories, [f"Tidy up, day {number}"], {})
            (folder / night).touch()
        verdict = _run(test_file, night, site_file)
        worse = [change for trend in history_of(store, "month").trends for change in trend.changes if change.worse]
        alarm = verdict.exit_code == 1 or bool(worse)
        print(f"{night} {verdict.status.value:12} {'ALARM' if alarm else ''}", flush=True)
        if alarm and number < planted_night:
            alarms.append(night)
        if alarm and number >= planted_night and found is None:
            found = number - planted_night + 1
    for line in trend_lines(history_of(store, "month").trends):
        print(line)
    print(f"{nights} nights in {time.monotonic() - began:.0f} s; false alarms before: {len(alarms)} {alarms}")
    print(f"a slow-down of {per_cent} % in night {planted_night + 1}: found after {found} night(s)")
    began = time.monotonic()
    result = bisect_regression("month", system=str(site_file), metric="step_time")
    print("\n".join(result_lines(result)))
    named = [one.commit for one in result.culprits]
    print(f"bisect took {time.monotonic() - began:.0f} s; it names the planted commit: {named == [slow]} ({slow})")
    return 0 if not alarms and found is not None and found <= 3 and named == [slow] else 1


def _run(test_file: Path, night: str, site_file: Path):
    from flows import run_pipeline

    return run_pipeline(test_file, night=night, system=str(site_file))


def _kept(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _files(folder: Path, bridge_url: str) -> tuple[Path, Path]:
    site = folder / "site.toml"
    environments = Path(os.environ.get("NIGHTBRIDGE_TEST_ENVIRONMENTS", ROOT / ".nightbridge/envs")).absolute()
    site.write_text(f'workspace = "{folder / "workspace"}"\nenvironments = "{environments}"\n')
    text = (ROOT / "conf/practice/llama_small.toml").read_text()
    text = text.replace(".nightbridge/practice", str(Path(bridge_url).parent)).replace('"llama_small"\nd', '"month"\nd')
    text = text.replace("save_interval = 20\n", "save_interval = 40\n")
    test = folder / "month.toml"
    test.write_text(text.replace("\n[[git_repos]]", '\n[harvest]\ncheckpoint = "none"\n\n[[git_repos]]'))
    return site, test


if __name__ == "__main__":
    given = sys.argv[1:]
    place = Path(given[3]) if len(given) > 3 else Path(tempfile.mkdtemp(prefix="practice-month-"))
    place.mkdir(parents=True, exist_ok=True)
    sys.exit(
        main(
            int(given[0]) if given else 30,
            int(given[1]) if len(given) > 1 else 64,
            float(given[2]) if len(given) > 2 else 3.0,
            place.absolute(),
        )
    )
