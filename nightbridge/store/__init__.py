"""The object store: `protocol` is the interface; `directory` and `s3` (the one package that uses boto3) implement it.

What is stored, and when a stored run is complete, is decided in `harvest`.
"""
