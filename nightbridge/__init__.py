"""The domain of nightbridge: configuration, launching, Slurm, outputs, storage, regression.

Nothing here imports Prefect; everything here can be used and tested alone. What runs as a flow lives in `flows`,
what is a task in `tasks`, what users configure in the Prefect UI in `blocks`.
"""

__version__ = "0.1.0"
