"""Slurm: the `Cluster` protocol and its implementations, job states, the sbatch shim, submission and the watcher.

Nothing here knows what a checkpoint or an event file is; what a run left behind comes in as `RunEvidence`.
"""
