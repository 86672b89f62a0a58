"""The command line: `main` holds the table of commands, and each other module those of one subject.

A module imports whatever is heavier than typer inside its commands.
"""
