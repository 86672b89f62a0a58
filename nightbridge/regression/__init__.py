"""What a night means: series, history, the gate, and the report.

`series` says which runs are compared, `history` keeps one row per run in the store, and `gate` turns a run and its
history into a verdict. `changepoints` and `trend` say since when a metric has another level, `parity` compares the
curves of two runs, `goldens` reads upstream's golden values and asks its rules, `stored` answers questions about runs
in the store, and `rebuild` makes the history again from them. `page`, `charts` and `wording` turn verdicts into what
people read, and `report` renders it.

Measuring a run is not done here (`nightbridge.outputs`), and nothing here starts, watches or changes a run.
"""
