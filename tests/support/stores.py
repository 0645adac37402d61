"""Stores of snapshots in tests: a node's lives as long as its process."""

from __future__ import annotations

from deadpool_plugin.mirror.store import SnapshotStore


def free(store: SnapshotStore) -> None:
    """Give back the memory of all slots."""
    store.drop_prepared()
    for rank in store.ranks():
        store.release(rank)


def ends(store: SnapshotStore, rank: int) -> tuple[int, int]:
    """Return the first and last step of which the store has call records of `rank`."""
    history = store.history(rank)
    return history.first, history.last
