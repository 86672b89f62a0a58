"""Nights: their ids, and the records of their runs and of their end.

A night is recorded twice: in the workspace whole, with every run and the site, to resume or cancel it; in the store in
short, to list nights. Nothing of Prefect here.
"""
