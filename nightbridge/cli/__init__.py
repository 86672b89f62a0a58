"""The command line: one command for each thing that a person does.

`main` is the entry point: it runs one command and turns every error into one message and an exit code.
"""
