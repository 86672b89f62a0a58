"""The gate: a run and its history to a verdict, users' decisions about it, and what changed when it became worse.

Nothing here measures a run (`outputs`), and nothing starts, watches or changes one.
"""
