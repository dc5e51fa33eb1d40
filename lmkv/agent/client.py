"""Clients of the agent API: `Client` blocks, and `AsyncClient` is for asyncio."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import httpx

from lmkv.errors import printable

_UNIX = "unix:"
_MAX_BYTES = 32 << 20
_SHOWN = 500
_OPENED = {f"connection.{how}.complete" for how in ("connect_tcp", "connect_unix_socket", "start_tls")}
Answer = TypeVar("Answer")
PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]


class _Calls(ABC, Generic[Answer]):
    """The calls of the agent API. `send` blocks in `Client`, and is a coroutine in `AsyncClient`.

    `timeout`: seconds for a complete response, in addition to the `wait` of a prefetch. `most`: largest number of bytes
    of a response.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0, most: int = _MAX_BYTES) -> None:
        self._url = url = _literal(url)
        self._timeout = timeout
        self._most = most
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._socket = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
        self._base: dict[str, Any] = {
            "base_url": "http://engine" if self._socket else url,
            # Compressed answers would have no bound.
            "headers": {"Accept-Encoding": "identity", **authorization},
            # A service on this machine needs no proxy from the environment, nor credentials from ~/.netrc.
            "trust_env": url.startswith("https:"),
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._url}>"

    @abstractmethod
    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request to the agent API and return the decoded JSON response. `GET /docs` describes all requests."""
        ...

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[float, dict[str, Any]]:
        """Return `(seconds, arguments)`: the time limit, and the keyword arguments for httpx."""
        limit = self._timeout + float((body or {}).get("wait", 0.0))
        return limit, {"method": method, "url": path, "json": body, "timeout": limit}

    def _add(self, found: bytearray, part: bytes) -> None:
        found += part
        if len(found) > self._most:
            raise ValueError(f"the answer has more than {self._most:,} bytes")

    def lookup(self, prompt: PromptLike, **scope: Any) -> Answer:
        """Look up how much of a prompt is stored.

        Returns `total_tokens`, `hit_tokens`, and `sources`, the number of hit tokens by tier.
        """
        return self.send("POST", "/v1/lookup", _body(prompt, scope))

    def prefetch(self, prompt: PromptLike, *, wait: float = 0.0, **scope: Any) -> Answer:
        """Load the stored chunks of a prompt into host memory. Waits at most `wait` seconds.

        Returns `id`, `done`, `found_tokens` (number stored in any tier) and `ready_tokens` (number in host memory now).
        """
        return self.send("POST", "/v1/prefetch", {**_body(prompt, scope), "wait": wait})

    def prefetched(self, name: str) -> Answer:
        """Return the progress of a prefetch, with the same fields as `prefetch`. `name`: the `id` that `prefetch`
        returned.
        """
        return self.send("GET", f"/v1/prefetch/{quote(name, safe='')}")

    def cancel(self, name: str) -> Answer:
        """Stop a prefetch. `name`: the `id` that `prefetch` returned."""
        return self.send("DELETE", f"/v1/prefetch/{quote(name, safe='')}")

    def end_session(self, name: str, **scope: Any) -> Answer:
        """End the session whose `session_id` is `name`, so that its chunks are evicted first.

        Pass the session's `cache_salt` and `tags`.
        """
        return self.send("DELETE", f"/v1/session/{quote(name, safe='')}", scope or None)

    def pin(self, prompt: PromptLike, *, seconds: float | None = None, **scope: Any) -> Answer:
        """Keep a prompt's chunks in host memory for `seconds`. Chunks that are not there now are not pinned.

        Returns `pinned_tokens` and `seconds`.
        """
        return self.send("POST", "/v1/pin", {**_body(prompt, scope), "seconds": seconds})

    def unpin(self, prompt: PromptLike, **scope: Any) -> Answer:
        """Remove the pins of a prompt's chunks. Returns `unpinned_chunks`."""
        return self.send("POST", "/v1/unpin", _body(prompt, scope))

    def clear(self, prompt: PromptLike | None = None, *, namespace: str | None = None, **scope: Any) -> Answer:
        """Delete a prompt's chunks, the chunks of a namespace, or all chunks. Returns `deleted_chunks`.

        `namespace`: the first hexadecimal digits of the namespace.
        """
        fields: dict[str, Any] = {} if namespace is None else {"namespace": namespace}
        asked = fields or {"everything": True} if prompt is None else _body(prompt, fields)
        return self.send("POST", "/v1/clear", {**asked, **scope})

    def stats(self) -> Answer:
        """Return the counters of the tiers, and how many tokens were looked up and found."""
        return self.send("GET", "/v1/stats")

    def requests(self) -> Answer:
        """Return `requests`: the reports of the last requests, newest first."""
        return self.send("GET", "/v1/requests")

    def explain(self, request: str) -> Answer:
        """Return the report of one request, with an `explanation` of its misses. `request`: the id in vLLM's response.

        If the request has several prompts or outputs, `parts` has a report for each of them.
        """
        return self.send("GET", f"/v1/explain/{quote(request, safe='')}")

    def history(self) -> Answer:
        """Return the values of the counters for every ten seconds of the last hour."""
        return self.send("GET", "/v1/history")

    def trace(self, after: int = 0) -> Answer:
        """Return `requests`: which chunks each request used, from the request with number `after` on."""
        return self.send("GET", f"/v1/trace?after={after}")

    def value(self) -> Answer:
        """Return estimates of how many hits larger or smaller tiers would give."""
        return self.send("GET", "/v1/value")

    def announce(self, engine: int) -> Answer:
        """Tell the first engine of a server that the engine with number `engine` runs."""
        return self.send("POST", "/v1/engines", {"engine": engine})


class Client(_Calls[dict[str, Any]]):
    """A blocking client of the agent API.

    Parameters
    ----------
    url : str
        The address that the server's log shows: `http://127.0.0.1:8377` or `unix:/path`.
    token : str, optional
        The engine's `agent_token`.
    timeout : float
        Seconds for a complete response, in addition to the `wait` of a prefetch.
    most : int
        Largest number of bytes of a response.

    Raises
    ------
    httpx.HTTPStatusError
        The server returns an error status. A call also raises httpx.TransportError if there is no response in time, and
        ValueError if the response does not come from lmkv.

    Notes
    -----
    Thread-safe. A prompt is a text, the messages of a chat, or a list of token ids. Each call for a prompt takes the
    `cache_salt` and `tags` of the prompt's requests as keywords. In `url`, `localhost` means 127.0.0.1.

    Examples
    --------
    >>> client = Client("unix:/run/lmkv.sock")
    >>> client
    <Client of unix:/run/lmkv.sock>
    >>> client.close()
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0, most: int = _MAX_BYTES) -> None:
        super().__init__(url, token, timeout=timeout, most=most)
        # Each call has a separate connection, which a timer may end.
        once = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(uds=self._socket, verify=False, limits=once) if self._socket else None
        self._http = httpx.Client(transport=transport, limits=once, **self._base)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        limit, asked = self._asked(method, path, body)
        found = bytearray()
        with _ended_after(limit) as trace, self._http.stream(**asked, extensions={"trace": trace}) as response:
            for part in response.iter_raw():
                self._add(found, part)
        return _decoded(_whole(response, found))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Calls[Awaitable[dict[str, Any]]]):
    """A client of the agent API for asyncio, with the methods of `Client` as coroutines."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0, most: int = _MAX_BYTES) -> None:
        super().__init__(url, token, timeout=timeout, most=most)
        transport = httpx.AsyncHTTPTransport(uds=self._socket, verify=False) if self._socket else None
        self._http = httpx.AsyncClient(transport=transport, **self._base)

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _decoded(await self.receive(method, path, body))

    async def receive(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send a request, and return the body of the response."""
        limit, asked = self._asked(method, path, body)
        found = bytearray()
        try:
            async with asyncio.timeout(limit), self._http.stream(**asked) as response:
                async for part in response.aiter_raw():
                    self._add(found, part)
        except TimeoutError:
            raise httpx.ReadTimeout(f"the server sent no complete answer within {limit:g} s") from None
        return _whole(response, found)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _body(prompt: PromptLike, scope: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt, **scope}
    kind = "messages" if prompt and isinstance(prompt[0], Mapping) else "tokens"
    return {kind: list(prompt), **scope}


@contextmanager
def _ended_after(seconds: float) -> Iterator[Any]:
    """Yield a trace function for httpx, which notes a request's connections. After `seconds`, these connections are
    closed.

    httpx's own timeout does not limit a response that arrives very slowly.
    """
    opened: list[socket.socket] = []

    def trace(event: str, about: Mapping[str, Any]) -> None:
        if event in _OPENED:
            opened.append(about["return_value"].get_extra_info("socket"))

    def end() -> None:
        for each in opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield trace
    finally:
        timer.cancel()


def _literal(url: str) -> str:
    """Return the URL with `localhost` replaced by 127.0.0.1.

    `localhost` may also mean ::1, where another user may listen. A URL with TLS is unchanged, because the certificate
    identifies the server.
    """
    if url.startswith(_UNIX):
        return url
    parsed = httpx.URL(url)
    is_name = parsed.scheme == "http" and parsed.host.rstrip(".") == "localhost"
    return str(parsed.copy_with(host="127.0.0.1")) if is_name else url


def _whole(response: httpx.Response, found: bytearray) -> bytes:
    """Return `found`, the body of a response. Raises httpx.HTTPStatusError for an error status."""
    if response.is_error:
        # Without the header that would have it decompressed.
        answer = httpx.Response(response.status_code, content=bytes(found), request=response.request)
        reason = f"HTTP {answer.status_code} from {response.request.url}: {printable(answer.text, _SHOWN)}"
        raise httpx.HTTPStatusError(reason, request=response.request, response=answer)
    return bytes(found)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except RecursionError as error:
        raise ValueError("the server's JSON answer is nested too deeply") from error
    if not isinstance(answer, dict):
        raise ValueError("the answer is not a JSON object")
    return answer
