"""The child process of `SubprocessBackend`, in which the client of a store runs.

python -m lmkv.backends.remote.child MODULE CONNECTION MEMORY [MEMORY ...]

The parent process calls methods of the class `StoreClient` in MODULE. CONNECTION and MEMORY are file descriptors.
Messages are JSON. The first message contains the options of the client.
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

from lmkv.errors import outside

ROOM, SLAB = 0, 1
"""Indexes of the shared memories: the buffer between parent and child, and the parent's slab if the slab is
registered.
"""
Part = tuple[int, int, int]
"""A run of a value's bytes in shared memory: the index of the memory, and the run's offset and length in bytes."""
MAX_MESSAGE_BYTES = 1 << 17
"""Size in bytes of the largest message. A message of this size fits into the buffer of a socket."""

_LEAVING = 4.0
"""Seconds that the client has to disconnect from its store."""


class Memory:
    """A region of memory that the parent process and the child process share."""

    def __init__(self, descriptor: int) -> None:
        self.view = mmap.mmap(descriptor, 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def __len__(self) -> int:
        return len(self.view)


def answer(client: Any, message: bytes) -> tuple[str, Any]:
    try:
        action, *arguments = json.loads(message)
        return "done", getattr(client, action)(*arguments)
    except BaseException as error:
        # A panic of a Rust client is not an Exception. The client's internals follow a blank line.
        reason = outside(f"{type(error).__name__}: {error}".partition("\n\n")[0])
        unavailable = isinstance(error, (OSError, *getattr(client, "unavailable", ())))
        return "unavailable" if unavailable else "failed", reason


def serve(connection: socket, client: Any) -> None:
    with suppress(OSError):
        connection.send(json.dumps(("done", None)).encode())
        while message := connection.recv(MAX_MESSAGE_BYTES):
            connection.send(json.dumps(answer(client, message)).encode())
    client.close()


def end_with(connection: int, seconds: float) -> None:
    """End this process `seconds` seconds after its parent has closed the connection, even if a call hangs."""
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll()
    time.sleep(seconds)
    os._exit(1)


def main(module: str, descriptor: str, *memories: str) -> None:
    # Once the parent has ended, another engine may use the memory of its slab: end at once.
    seconds = _LEAVING if len(memories) <= SLAB else 0.0
    threading.Thread(target=end_with, args=(int(descriptor), seconds), daemon=True).start()
    connection = socket(fileno=int(descriptor))
    options = json.loads(connection.recv(MAX_MESSAGE_BYTES))
    client = import_module(module).StoreClient([Memory(int(memory)) for memory in memories], **options)
    serve(connection, client)
    # C++ destructors may hang when the store does not answer.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
