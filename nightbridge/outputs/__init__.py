"""What a run leaves on disk: experiment folder, checkpoints, event files, log lines, and the measurements from them.

    experiment.py       everything that exactly one job left, as one model; its environment, and what that ran with
    run_evidence.py     what the run itself says: how far it came, and what really ran
    event_files.py      TensorBoard event files to rows: event_blocks.py decodes many plain records at once,
                        event_decoder.py any single one
    logs.py             log lines to step records and markers
    log_errors.py       the line that says best why a run failed; failure_patterns.py has what programs write
    curves.py           both put together, per iteration
    measurements.py     the summary of a run
    training_report.py  the same in CloudAI's form
    following.py        logs and event files of a running job
    reader_process.py   the children in which all of this is read
    checkpoints.py      which checkpoints are whole; torch_check.py has torch load one

Files are only read here: nothing is uploaded, changed or compared with other runs. Their damage is part of the answer.
"""
