"""What is shown of a job while it runs."""

import pytest

from nightbridge.outputs.following import MOST_LINES, Progress, RunFollower


def step(iteration, seconds=0.5, total=50):
    return (
        f" [2026-11-21 01:02:03] iteration {iteration:8d}/{total:8d} | consumed samples: 8 |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} | lm loss: 2.5E+00 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def test_new_lines_are_shown_once_and_the_last_of_many(run_folder):
    follower = RunFollower(run_folder.job, ())
    log = run_folder.log("one\n\ntwo\n")
    first, second = follower.look(), follower.look()
    log.write_text(log.read_text() + "".join(f"{number}\n" for number in range(100)))
    third = follower.look()
    assert (first.lines, second.lines) == (("one", "two"), ())
    assert (len(third.lines), third.lines[-1], third.left_out) == (MOST_LINES, "99", 100 - MOST_LINES)
    assert str(third).startswith(f"... {100 - MOST_LINES} more lines in {log}\n")


def test_no_secret_is_shown_not_even_one_that_is_cut_or_has_several_lines(run_folder):
    secret, key = "hf_0123456789abcdef", "-----BEGIN KEY-----\nMIIEvAIBADANBg\n-----END KEY-----"
    run_folder.log(f"token {secret}\n{'x' * 490}{secret}\n{key}\n")
    shown = str(RunFollower(run_folder.job, (secret, key)).look())
    assert "token ********" in shown
    assert not any(part in shown for part in (secret[:10], "MIIEvAIBADANBg"))


def test_progress_says_how_far_how_fast_and_how_long_still(run_folder):
    follower = RunFollower(run_folder.job, ())
    run_folder.log("starting\n")
    before = follower.look().progress
    run_folder.log(step(9, 4.0) + step(10) + step(11), restart=1)
    progress = follower.look().progress
    assert before is None
    assert progress == Progress(iteration=11, total=50, step_time=0.5)
    assert (progress.percent, str(progress)) == (22.0, "iteration 11/50, 0.5 s a step, 0:00:20 left")


def test_a_last_step_without_a_line_end_counts_when_the_job_has_ended(run_folder):
    follower = RunFollower(run_folder.job, ())
    run_folder.log(step(49) + step(50).rstrip("\n"))
    while_it_runs, at_the_end = follower.look(), follower.last_look()
    assert while_it_runs.progress.iteration == 49
    assert (at_the_end.progress.iteration, len(at_the_end.lines)) == (50, 1)


def test_a_job_without_a_folder_shows_nothing(run_folder):
    run_folder.job_dir.rmdir()
    news = RunFollower(run_folder.job, ()).look()
    assert (news.lines, news.progress) == ((), None)


@pytest.mark.parametrize("total", [0, 5])
def test_progress_never_passes_its_end(total):
    assert 0 <= Progress(iteration=10, total=total, step_time=1.0).percent <= 100
    assert Progress(iteration=10, total=total, step_time=1.0).seconds_left == 0
