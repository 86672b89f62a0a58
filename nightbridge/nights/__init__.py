"""Nights: their ids, and the records of their runs and of their end.

A night is recorded twice: in the workspace whole, with every run and the site, to resume or cancel it; in the store in
short, to list nights (`records`). `liveness` says whether a night's process lives, `status` where its runs are,
`missing_verdicts` which of the `expected_verdicts` are not there. Prefect's server is only asked (`prefect_api`).
"""
