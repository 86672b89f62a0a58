"""What a night means: series, history, the gate, and the report.

`series` says which runs are compared, `history` keeps one row per run in the store (`rows`: what a row says,
`row_objects` and `packs`: how they lie there), and `gate` turns a run and its history into a verdict: `look_back` says
how much of it, `metrics` says what is gated, `bands` how far one night may be off, `standing` whether all nights
together say that a level is worse, `confirm` what a night's re-runs say, `nodes` what its nodes have to do with it,
`decisions` and `accept` users' decisions about it, and `evidence` gathers all that from the store. `suspects` and
`differences` say what changed when a run became worse. `changepoints` and `trend` say since when a metric has another
level, `nightly_values` what its value of a night is, `parity` compares the curves of two runs, `goldens` reads
upstream's golden values and asks its rules, `golden_gate` asks them about a stored run, `stored` answers questions
about runs in the store, and `rebuild` makes the history again from them. `bisect` names the commit that made a test
worse, `sweeps` the best point of a sweep. `page`, `since`, `charts` and `wording` turn verdicts into reports,
`report` renders it, and `junit` writes it for CI systems.

Measuring a run is not done here (`nightbridge.outputs`), and nothing here starts, watches or changes a run.
"""
