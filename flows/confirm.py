"""A suspicious run is run again before anybody is alarmed: the loop around the verdicts of a night."""

from collections.abc import Callable, Iterable, Sequence

from nightbridge.models import RunSpec, Verdict

NODE_LIST = "--nodelist="
EXCLUDE = "--exclude="


def confirmed(
    runs: Sequence[RunSpec],
    verdicts: Sequence[Verdict],
    run_again: Callable[[Sequence[RunSpec]], object],
    judge_again: Callable[[RunSpec, int], Verdict],
) -> list[Verdict]:
    """Give each run the further runs that its verdict wants, and judge it again, until no verdict wants more.

    A round's further runs go side by side, in the order of the runs, so that a retried night finds them again. Each is
    given once, whatever becomes of it: how many a verdict may want is bounded by its test's policy.

    Args:
        runs: The night's own runs.
        verdicts: The verdict of each.
        run_again: Runs what it is given through all stages.
        judge_again: The verdict on a run of the night, now that so many further runs were asked for.
    """
    judged = list(verdicts)
    asked = [0] * len(runs)
    while True:
        lacking = [place for place, verdict in enumerate(judged) if verdict.reruns > asked[place]]
        if not lacking:
            return judged
        run_again([repeat for place in lacking for repeat in _repeats(runs[place], judged[place], asked[place])])
        for place in lacking:
            asked[place] = judged[place].reruns
            judged[place] = judge_again(runs[place], asked[place])


def repeat_of(run: RunSpec, number: int, without: Iterable[str] = ()) -> RunSpec:
    """The same run once more, as a run of its own; not on the given nodes, unless the test names its nodes itself."""
    options = run.test.sbatch_args
    nodes = sorted(without)
    if nodes and not any(option.startswith(NODE_LIST) for option in options):
        excluded = [option.removeprefix(EXCLUDE) for option in options if option.startswith(EXCLUDE)]
        kept = tuple(option for option in options if not option.startswith(EXCLUDE))
        options = (*kept, EXCLUDE + ",".join([*excluded, *nodes]))
    test = run.test.model_copy(update={"sbatch_args": options})
    return run.model_copy(update={"repeat": number, "test": test})


def _repeats(run: RunSpec, verdict: Verdict, asked: int) -> Iterable[RunSpec]:
    return (repeat_of(run, number, verdict.suspect_nodes) for number in range(asked + 1, verdict.reruns + 1))
