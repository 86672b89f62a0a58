"""A small workload that this project owns: Megatron-Bridge- and Run-shaped repositories whose jobs really train.

`template/` holds the files of both repositories: they are data here, run from checkouts by the launcher environment's
Python, and never imported. Losses and checkpoints are computed; step times, memory and TFLOP/s are declared.
"""
