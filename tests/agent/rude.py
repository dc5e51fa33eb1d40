"""A server at an engine's private socket that answers whatever it is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lmkv.agent.server import Address
from tests.kit import LIMIT

Answer = Callable[[bytes, socket.socket], None]


def as_http(body: bytes, status: int = 200, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def as_json(answer: Any) -> bytes:
    return as_http(json.dumps(answer).encode())


class RudePeer:
    """Answers each connection with `bytes`, or as `answer(asked, connection)` does."""

    def __init__(self, address: Address, answer: Answer | None = None) -> None:
        self.bytes = as_json({})
        self.asked: list[bytes] = []
        self._answer = answer or self._send
        self._bound, self.url = address.bind()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _send(self, _: bytes, connection: socket.socket) -> None:
        connection.sendall(self.bytes)

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._bound.accept()
                connection.settimeout(LIMIT)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(1 << 16)
            self.asked.append(asked)
            self._answer(asked, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()
        Path(self.url.removeprefix("unix:")).unlink(missing_ok=True)
