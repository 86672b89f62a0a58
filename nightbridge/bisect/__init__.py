"""Bisect: which commit did it. `plan` asks the question, `search` chooses the next commit, `result` says what it found.

Nothing is run here: `flows/bisect.py` does.
"""
