"""Bisect: which commit did it.

`shift` finds what became worse, `plan` fixes what is searched, `search` chooses the next commit, `result` sums up.

Nothing is run here: `flows/bisect.py` does.
"""
