"""An HTTP proxy before a real server, which answers some requests itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

Rule = Callable[[str, str], tuple[int, bytes] | None]
"""Method and path of a request -> the status and the body to answer with, or None to forward it."""
_NOT_FORWARDED = ("connection", "transfer-encoding", "keep-alive")


def forward_all(method: str, path: str) -> None:
    """The rule of a proxy that answers nothing itself."""


class RuledProxy:
    """Forwards requests to a port of loopback, but those that `rule` answers. `refused`: how many those were."""

    def __init__(self, target: int) -> None:
        self.rule: Rule = forward_all
        self.refused = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(1 << 16)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                ruled = proxy.rule(self.command, self.path)
                proxy.refused += ruled is not None
                status, headers, answer = self._forwarded(body) if ruled is None else (ruled[0], {}, ruled[1])
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                connection = HTTPConnection("127.0.0.1", target)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
                kept = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_FORWARDED}
                connection.close()
                return answer.status, kept, content

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
