"""Where runs are kept.

`objects` is the protocol; `directory` and `s3` (the one module that uses boto3) keep it. `harvest` brings a run in:
`selection` chooses files, `upload` sends them without secrets, `manifest` commits. `restore` checks and fetches.

Must not live here: what the files mean (outputs) and what the numbers mean (regression).
"""
