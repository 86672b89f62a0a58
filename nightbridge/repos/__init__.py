"""Git mirrors, immutable checkouts and launcher environments: code that is exactly what its commit says.

Nothing here knows what a launcher does with them, and nothing outside runs git.
"""
