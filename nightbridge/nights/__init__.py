"""Nights: their ids, and the records that say which runs a night has and how it ended.

A night is recorded twice: in the workspace whole, with every run and the site, for whoever resumes or cancels
it; in the store in short, for whoever asks which nights there were. Nothing of Prefect here.
"""
