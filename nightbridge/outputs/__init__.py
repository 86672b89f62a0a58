"""What a run leaves on disk, and what it says: experiment folder, checkpoints, event files, log lines, measurements.

    experiment.py     everything that exactly one job left, as one model; the evidence for how it ended
    event_files.py    TensorBoard event files to rows (event_wire.py decodes the records, event_tail.py reads on while
                      a job writes)
    logs.py           log lines to step records and markers
    curves.py         both put together, per iteration
    measurements.py   the summary of a run (settings.py its configuration, durations.py how long it waited and
                      stood still, loss_curve.py its losses in a few characters)
    checkpoints.py    which checkpoints are whole (metadata_pickle.py reads their index without running it)

Files are only read here: nothing is uploaded, changed or compared with other runs. Their damage is part of the answer.
"""
