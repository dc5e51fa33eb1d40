"""Claims on chunks of the primary tier: leases (to read) and reservations (to write).

What a lookup promises it must lease, what is leased stays, and every claim ends: use them as context managers
or give them to somebody who ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attrs import define, field

from lmkv.protocols import ChunkKey

if TYPE_CHECKING:
    from lmkv.promotion import Promotion
    from lmkv.tiered import TieredStore


class State(Enum):
    """Of an entry in the primary tier. Absent entries have none."""

    WRITING = "writing"
    LOADING = "loading"
    READY = "ready"


@define(eq=False)
class Entry:
    """One chunk of the primary tier. Changed only under the store's lock.

    `refs`: leases, running I/O, promotions and pins that hold the slot. `gone`: removed from the index while
    held; the slot is freed when the last holder lets go. `demoting`: being copied down before it goes.
    """

    key: ChunkKey
    slot: int
    state: State
    parent: ChunkKey = b""
    tokens: bytes = b""
    refs: int = 0
    gone: bool = False
    demoting: bool = False
    waiters: list[Promotion] = field(factory=list)


class Lease:
    """A read claim on the leading chunks of a request: their slots keep their bytes until `release`."""

    def __init__(self, store: TieredStore, entries: Sequence[Entry]) -> None:
        self._store = store
        self._entries = tuple(entries)
        self._released = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def slots(self) -> list[int]:
        return [entry.slot for entry in self._entries]

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self._entries]

    def release(self) -> None:
        """Idempotent. Takes the store's lock."""
        if not self._released:
            self._released = True
            self._store._let_go_all(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Reservation:
    """A write claim on chunks that are about to be stored. What is not committed is aborted at the end.

    `handled`: how many of the wanted keys, from the first, are taken care of: reserved here, or already
    stored or being stored by somebody. Fewer than wanted when the tier has no slot to give.
    """

    def __init__(self, store: TieredStore, entries: Sequence[Entry], handled: int) -> None:
        self._store = store
        self._open = {entry.key: entry for entry in entries}
        self.handled = handled

    @property
    def slots(self) -> dict[ChunkKey, int]:
        """Slots to fill, by key, in the order of the wanted keys."""
        return {key: entry.slot for key, entry in self._open.items()}

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """The slots of `keys` (default: all) are filled: publish them. Takes the store's lock."""
        self._store._commit(self._take(keys))

    def abort(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Nothing usable is in the slots of `keys` (default: all): free them. Takes the store's lock."""
        self._store._abort(self._take(keys))

    def _take(self, keys: Sequence[ChunkKey] | None) -> list[Entry]:
        wanted = list(self._open) if keys is None else keys
        return [self._open.pop(key) for key in wanted if key in self._open]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
