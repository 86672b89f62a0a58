"""History: one row per run in the store, and what the rows of a series say.

`rows` says what a row holds, `history_store` how rows lie in the store, `reading` which of them a verdict looks at,
`metrics` what is measured, `nightly_values` and `changepoints` what a metric's level was, and `rebuild` makes the rows
again from the stored runs. Whether a run is good is decided in `gate`.
"""
