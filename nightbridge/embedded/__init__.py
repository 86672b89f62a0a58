"""The embedded cluster: runs batch scripts on this machine, unchanged, behind the same interface as Slurm."""
