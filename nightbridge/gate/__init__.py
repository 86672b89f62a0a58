"""The gate: a run and its history to a verdict, users' decisions about it, and what changed when it became worse.

    stored_verdicts.py    a stored run, judged: gathers, compares, records; and judges a series again
    evidence.py           what else goes in: golden values, the contract, the canary
    run_verdict.py        the verdict on a run, of all metrics and of everything else that is known
    plausibility.py       whether the run is whole and did what was planned
    determinism.py        whether its losses are the same, bit for bit
    metric_comparison.py  one metric against its history: band, floor and ceiling, level, further runs
    tonight.py            what that is asked of: tonight's runs, and each metric's past
    control_arm.py        pairs of runs of the last good point and tonight's, on the same nodes
    nodes.py              what the nodes have to do with the numbers
    trend.py              changes of level over the nights, and what of a verdict is news
    suspects.py           what is not the same in two nights
    decisions.py          users' decisions: what they say and how they are kept
    accept.py             `accept` stores and withdraws them
    paired_trial.py       a change that is tried before it lands

Nothing here measures a run (`outputs`), and nothing starts, watches or changes one.
"""
