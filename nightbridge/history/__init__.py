"""History: one row per run in the store, and the trend of each metric.

`rows` defines a row and a metric's value of a run, `history_store` how rows lie in the store, `reading` reads, adds and
rebuilds them, `nightly_values` makes a metric's value of a night, `noise` knows what moves that without the code, and
`changepoints` finds when its level shifted. Whether a run is good is decided in `gate`.
"""
