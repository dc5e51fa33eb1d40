"""What listens at a store's address, and is no such store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Self

Answer = Callable[[bytes], Iterable[bytes]]
"""What to send for what was received."""


class Endpoint:
    """A port of loopback that answers each piece that it receives with what `answer` yields.

    `closes`: the first answer ends the connection. `connections`: how many there were.
    """

    def __init__(self, answer: Answer, *, closes: bool = False) -> None:
        self._answer, self._closes = answer, closes
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        self.closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), closing(connection):
            while received := connection.recv(1 << 16):
                for piece in self._answer(received):
                    connection.sendall(piece)
                if self._closes:
                    # The rest of the question would turn the end of the connection into its reset.
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

    def is_left(self) -> bool:
        """Whether all who came have left."""
        return self.connections == len(self._open) and all(each.fileno() < 0 for each in self._open)

    def close(self) -> None:
        self.closed.set()
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def of_redis(answer: bytes) -> Answer:
    """This answer to each command but those that a client begins with, all of which are fine."""

    def answers(received: bytes) -> Iterator[bytes]:
        greetings = received.count(b"\r\nCLIENT\r\n") + received.count(b"\r\nPING\r\n")
        yield b"+OK\r\n" * greetings if greetings else answer

    return answers


def of_http(body: bytes, status: str = "200 OK", **headers: object) -> Answer:
    """This answer to each request, with the length of the body unless the headers have another."""
    given = {"Content-Length": len(body), "Content-Type": "application/xml", "Connection": "close"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return lambda _: ["\r\n".join([*lines, "", ""]).encode() + body]


@contextmanager
def longest_pause() -> Iterator[list[float]]:
    """The longest time, in seconds, for which a thread that is always ready could not run meanwhile."""
    found, stop = [0.0], threading.Event()

    def run() -> None:
        before = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            found[0], before = max(found[0], now - before), now

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
