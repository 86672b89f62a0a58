"""Container images: references, import with enroot, digest, verification.

What comes out is a whole .sqsh file of known digest, or the declared absence of a container; how a job starts in it is
the launcher's affair.
"""
