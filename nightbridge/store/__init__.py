"""The object store: `object_store` is the interface; `directory` and `s3`, which alone uses boto3, implement it.

What is stored, and when a stored run is complete, is decided in `harvest`.
"""
