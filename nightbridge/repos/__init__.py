"""Git mirrors, immutable checkouts and launcher environments: code that is exactly that of its commit.

Nothing here knows what a launcher does with them, and nothing outside runs git.
"""
