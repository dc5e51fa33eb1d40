"""The other side of `isolated`: a process with the client of a store in it.

python -m lmkv.backends.remote.child MODULE CONNECTION MEMORY [MEMORY ...]

`MODULE` has a `StoreClient`, made with the memories and with options, which come first; its methods are the calls. All
but it are file descriptors. Messages are JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from socket import socket
from typing import Any

ROOM, SLAB = 0, 1
"""Which memory: that between the two processes, and that of the parent's chunks, if there is any."""
Part = tuple[int, int, int]
"""Bytes of a value: in which memory, at what offset, and how many."""
MAX_MESSAGE_BYTES = 1 << 17
"""Bytes, so that it fits into a socket's buffer."""

_LEAVING = 4.0
"""Seconds for the client to leave its store."""


class Memory:
    """What both processes map."""

    def __init__(self, descriptor: int) -> None:
        self.view = mmap.mmap(descriptor, 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def __len__(self) -> int:
        return len(self.view)


def answer(client: Any, message: bytes) -> tuple[str, Any]:
    try:
        action, *arguments = json.loads(message)
        return "done", getattr(client, action)(*arguments)
    except Exception as error:
        return "unavailable" if isinstance(error, OSError) else "failed", f"{type(error).__name__}: {error}"[:1000]


def serve(connection: socket, client: Any) -> None:
    with suppress(OSError):
        connection.send(json.dumps(("done", None)).encode())
        while message := connection.recv(MAX_MESSAGE_BYTES):
            connection.send(json.dumps(answer(client, message)).encode())
    client.close()


def end_with(connection: int, seconds: float) -> None:
    """End this process so long after its parent has closed the connection, whatever hangs."""
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll()
    time.sleep(seconds)
    os._exit(1)


def main(module: str, descriptor: str, *memories: str) -> None:
    # The slab is another engine's room as soon as its own has ended.
    seconds = _LEAVING if len(memories) <= SLAB else 0.0
    threading.Thread(target=end_with, args=(int(descriptor), seconds), daemon=True).start()
    connection = socket(fileno=int(descriptor))
    options = json.loads(connection.recv(MAX_MESSAGE_BYTES))
    client = import_module(module).StoreClient([Memory(int(memory)) for memory in memories], **options)
    serve(connection, client)
    # C++ destructors of a client whose store is away may hang.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
