"""Pins a slab for a device in the background, so that transfers are asynchronous and at full speed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmkv.memory.device import Addresses, Device, DeviceError
from lmkv.memory.slab import SlabMap

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Bytes per registration: on an H100 a launch waits 1.5 ms for one, 5 for 128 MiB. A whole slab may be too much."""


class PinnedSlab:
    """One rank's part of a slab, populated and then registered with the device, in pieces of whole slots.

    Copies of memory that is not registered, yet or because the driver refuses, are slower and block the calling
    thread, but are just as correct. `part`: offset and bytes in each slot. `share`: (index, count) of this
    rank among those that have the same part, of which each populates its share. `threads`: with 0, only `pin_next`
    registers anything.
    """

    def __init__(
        self,
        device: Device,
        slab: SlabMap,
        part: tuple[int, int] | None = None,
        share: tuple[int, int] = (0, 1),
        *,
        threads: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._device, self._slab, self._address = device, slab, slab.address
        self._pieces = slab.spans(part or (0, slab.slot_bytes), piece_bytes, share)
        self._pinned: npt.NDArray[np.bool_] = np.zeros(slab.num_slots, np.bool_)
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="lmkv-pin", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<PinnedSlab: {int(self._pinned.sum())} of {self._slab.num_slots} slots>"

    def holds(self, hosts: Addresses) -> npt.NDArray[np.bool_]:
        """Which of these addresses in the slab are registered."""
        pinned: npt.NDArray[np.bool_] = self._pinned[(hosts - self._address) // self._slab.slot_bytes]
        return pinned

    def _run(self) -> None:
        # Not at a lower priority: it holds locks of the driver, for which threads that launch kernels wait.
        while self.pin_next():
            pass

    def pin_next(self) -> bool:
        """Populate and register the next piece; False when all are done, or the driver has refused one."""
        with self._lock:
            piece = None if self._stop.is_set() else next(self._pieces, None)
        if piece is None:
            return False
        try:
            # A registration would fault the pages in as well, one by one and under locks of the driver.
            self._slab.prefault(*piece)
            self._register(*piece)
        except Exception as error:
            # Any error is harmless: copies of unpinned memory are correct.
            self._stop.set()
            message = "lmkv: %r is all the driver pins, copies of the rest are slower: %s"
            logger.warning(message, self, error, exc_info=not isinstance(error, DeviceError))
        return True

    def _register(self, offset: int, nbytes: int) -> None:
        self._undo.append(self._device.register(self._address + offset, nbytes))
        first, last = offset // self._slab.slot_bytes, (offset + nbytes - 1) // self._slab.slot_bytes
        self._pinned[first : last + 1] = True

    def wait(self) -> None:
        """Wait until no more will be registered."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Register nothing more."""
        self._stop.set()
        self.wait()

    def close(self) -> None:
        """Unregister everything. No copy may be under way. Idempotent."""
        # Afterwards `_undo` is complete: nothing stays registered that is unmapped next.
        self.stop()
        while self._undo:
            # A device that has failed refuses this, too; its registrations end with the process.
            with contextlib.suppress(Exception):
                self._undo.pop()()


def pinning_threads(ranks: int) -> int:
    """How many threads populate and register, of each rank: a quarter of the machine's cores at most."""
    return max(1, min(4, (os.cpu_count() or 1) // 4 // ranks))
