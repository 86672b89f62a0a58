"""Stores of every kind, as the object store's own tests use them."""

from tests.nightbridge.store.conftest import settings_of, store

__all__ = ["settings_of", "store"]
