"""Slurm: the `Cluster` protocol and its implementations, job states, the sbatch shim, submission and the watcher.

Nothing here knows what a checkpoint or an event file is; the output of a run comes in as `RunEvidence`.
"""
