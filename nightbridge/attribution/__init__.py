"""Attribution: which change made a test worse, on every axis that a run has.

`axes` finds what changed, `belief` chooses the runs, `plan` keeps the question, `result` sums up.

Nothing is run here: `flows/attribute.py` does.
"""
