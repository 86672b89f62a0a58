"""A month of the practice workload: a small slow-down at a known commit among many. Is it found, and named?

    python benchmarks/practice_month.py [--nights 30] [--commits 64] [--per-cent 3] [--folder FOLDER]

Every night runs through the whole pipeline on this machine, re-runs of suspicious results included. Each night brings
one harmless commit, except the sixth from the end, which brings many at once, one of which makes training slower.
Printed are false alarms before it, nights until it was found, and what bisect says; the exit code is 0 when there was
no false alarm, it was found within three nights, and bisect named just that commit. The same FOLDER goes on with a
month that was interrupted.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TEST = "month"
FIRST_NIGHT = date(2026, 10, 1)
NIGHTS_AFTER = 6
FOUND_WITHIN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=30)
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--per-cent", type=float, default=3.0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="practice-month-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _quiet_prefect(folder)
    return month(given.nights, given.commits, given.per_cent, folder)


def month(nights: int, commits: int, per_cent: float, folder: Path) -> int:
    from examples.practice.repositories import commit_many, make_practice_repositories
    from nightbridge.bisect.result import result_lines
    from nightbridge.config.sites import plain_site
    from nightbridge.flows import bisect_regression, nightly_regression
    from nightbridge.models import SiteChoice
    from nightbridge.report.queries import history_of
    from nightbridge.report.trend_table import trend_lines
    from nightbridge.store.object_store import open_store

    repositories = make_practice_repositories(folder / "practice")
    site_file, test_file = _files(folder, repositories.bridge_url)
    site = plain_site(SiteChoice(system=str(site_file)))
    assert site is not None
    store = open_store(site[0].store_settings)
    planted_night, planted_place = nights - NIGHTS_AFTER, commits * 5 // 8
    kept, alarms, found = folder / "slow", [], None
    began = time.monotonic()
    for number in range(nights):
        night = (FIRST_NIGHT + timedelta(days=number)).isoformat()
        # What a night brings is pushed once, also where the month was interrupted.
        if not (folder / night).exists():
            if number == planted_night:
                slower = {planted_place: {"step_time_factor": 1 + per_cent / 100}}
                pushed = commit_many(repositories, [f"Change {n} of {commits}" for n in range(commits)], slower)
                kept.write_text(pushed[planted_place])
            else:
                commit_many(repositories, [f"Tidy up, day {number}"], {})
            (folder / night).touch()
        (verdict,) = nightly_regression(test_file, night=night, system=str(site_file)).verdicts
        worse = [change for trend in history_of(store, TEST).trends for change in trend.changes if change.worse]
        alarm = verdict.exit_code == 1 or bool(worse)
        step_time = next(item for item in verdict.comparisons if item.metric == "step_time")
        print(f"{night} {verdict.status.value:12} {step_time.value:.4f} s {'ALARM' if alarm else ''}", flush=True)
        if alarm and number < planted_night:
            alarms.append(night)
        if alarm and number >= planted_night and found is None:
            found = number - planted_night + 1
    print("\n".join(trend_lines(history_of(store, TEST).trends)))
    print(f"{nights} nights in {time.monotonic() - began:.0f} s; false alarms before: {len(alarms)} {alarms}")
    print(f"{per_cent:g} % slower in night {planted_night + 1}: found in night {found} of the new level")
    began = time.monotonic()
    result = bisect_regression(TEST, system=str(site_file), metric="step_time")
    print("\n".join(result_lines(result)))
    exact = [one.commit for one in result.culprits] == [kept.read_text()]
    print(f"bisect took {time.monotonic() - began:.0f} s; it names the planted commit: {exact} ({kept.read_text()})")
    return 0 if exact and not alarms and found is not None and found <= FOUND_WITHIN else 1


def _quiet_prefect(folder: Path) -> None:
    """Prefect reads its settings when it is imported: the month has a server, a database and silence of its own."""
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_HOME=str(folder / "prefect"),
        PREFECT_LOGGING_LEVEL="ERROR",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
    )


def _files(folder: Path, bridge_url: str) -> tuple[Path, Path]:
    """A site of the folder's own, and the small practice test with these repositories, which keeps no checkpoints."""
    site = folder / "site.toml"
    environments = Path(os.environ.get("NIGHTBRIDGE_TEST_ENVIRONMENTS", ROOT / ".nightbridge/envs")).absolute()
    site.write_text(f'workspace = "{folder / "workspace"}"\nenvironments = "{environments}"\n')
    text = (ROOT / "conf/practice/llama_small.toml").read_text(encoding="utf-8")
    text = text.replace(".nightbridge/practice", str(Path(bridge_url).parent))
    text = text.replace('\nname = "llama_small"', f'\nname = "{TEST}"').replace(
        "save_interval = 20", "save_interval = 40"
    )
    text = text.replace("[harvest]", '[harvest]\ncheckpoint = "none"')
    test = folder / "month.toml"
    test.write_text(text, encoding="utf-8")
    return site, test


if __name__ == "__main__":
    sys.exit(main())
