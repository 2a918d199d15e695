"""The store of translator assets on this machine: `LocalStore` publishes, finds, verifies,
collects."""

from kvbridge.registry.store.store import LocalStore, default_home

__all__ = ["LocalStore", "default_home"]
