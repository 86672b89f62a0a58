"""History: one row per run in the store, and the trend of each metric.

`rows` defines a row, `history_store` how rows lie in the store, `reading` reads, adds and rebuilds them, `metrics` and
`nightly_values` make a metric's value of a run and of a night, `noise` knows what moves that without the code, and
`changepoints` finds when its level shifted. Whether a run is good is decided in `gate`.
"""
