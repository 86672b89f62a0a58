"""Attribution: which change made a test worse, on every axis that a run has.

`axes` finds what changed, `factor_search` chooses the runs, `attribution_plan` keeps what is searched,
`attribution_result` sums up, and plans the search inside a range of the cause.

Nothing is run here: `flows/attribute.py` does.
"""
