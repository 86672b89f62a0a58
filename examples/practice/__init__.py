"""Small workloads that this project owns: Megatron-Bridge-, Run- and Megatron-LM-shaped repositories that really train.

`template/` holds the files of the repositories: they are data here, run from checkouts by the launcher environment's
Python, and never imported. Losses and checkpoints are computed; step times, memory and TFLOP/s are declared.
"""
