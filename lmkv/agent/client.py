"""Clients of the agent API, for programs that wait and for programs that await."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import httpx

_UNIX = "unix:"
Answer = TypeVar("Answer")
PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]


class _Calls(ABC, Generic[Answer]):
    """The calls, whose answers a subclass waits for or awaits. `timeout`: seconds, besides what a prefetch waits."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0) -> None:
        self._url = url
        self._timeout = timeout
        self._socket = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
        self._base: dict[str, Any] = {"base_url": "http://engine" if self._socket else url, "headers": _headers(token)}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._url}>"

    @abstractmethod
    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer: ...

    def _limit(self, body: Mapping[str, Any] | None) -> float:
        return self._timeout + float((body or {}).get("wait", 0.0))

    def lookup(self, prompt: PromptLike, **apart: Any) -> Answer:
        """`total_tokens`, `hit_tokens` and the `sources` that have them."""
        return self._send("POST", "/v1/lookup", _body(prompt, apart))

    def prefetch(self, prompt: PromptLike, *, wait: float = 0.0, **apart: Any) -> Answer:
        """`id`, `done`, `found_tokens` and `ready_tokens`, after `wait` seconds at most."""
        return self._send("POST", "/v1/prefetch", {**_body(prompt, apart), "wait": wait})

    def prefetched(self, name: str) -> Answer:
        """How far the prefetch with this `id` is."""
        return self._send("GET", f"/v1/prefetch/{name}")

    def cancel(self, name: str) -> Answer:
        """Stop the prefetch with this `id`."""
        return self._send("DELETE", f"/v1/prefetch/{name}")

    def pin(self, prompt: PromptLike, *, seconds: float | None = None, **apart: Any) -> Answer:
        """`pinned_tokens`, and for how many `seconds`."""
        return self._send("POST", "/v1/pin", {**_body(prompt, apart), "seconds": seconds})

    def unpin(self, prompt: PromptLike, **apart: Any) -> Answer:
        """`unpinned_chunks`."""
        return self._send("POST", "/v1/unpin", _body(prompt, apart))

    def clear(self, prompt: PromptLike | None = None, **apart: Any) -> Answer:
        """`deleted_chunks`: a prompt's, or without one all there are."""
        return self._send("POST", "/v1/clear", {"everything": True} if prompt is None else _body(prompt, apart))

    def stats(self) -> Answer:
        """The counters of the tiers."""
        return self._send("GET", "/v1/stats")


class Client(_Calls[dict[str, Any]]):
    """A client that waits for each answer.

    Parameters
    ----------
    url : str
        As the engine's log says: `http://127.0.0.1:8377` or `unix:/path`.
    token : str, optional
        The engine's `agent_token`.
    timeout : float
        Seconds for an answer, besides what a prefetch waits.

    Raises
    ------
    httpx.HTTPStatusError
        By each call, for an answer that is an error; httpx.TransportError where nobody answers.

    Notes
    -----
    Thread-safe. A prompt is a text, the messages of a chat, or a list of token ids. `cache_salt` and `tags` may
    come with it, as the request that follows has them.

    Examples
    --------
    >>> client = Client("unix:/run/lmkv.sock")
    >>> client
    <Client of unix:/run/lmkv.sock>
    >>> client.close()
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0) -> None:
        super().__init__(url, token, timeout=timeout)
        transport = httpx.HTTPTransport(uds=self._socket) if self._socket else None
        self._http = httpx.Client(transport=transport, **self._base)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _answer(self._http.request(method, path, json=body, timeout=self._limit(body)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Calls[Awaitable[dict[str, Any]]]):
    """`Client` for asyncio: the same calls, to be awaited."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0) -> None:
        super().__init__(url, token, timeout=timeout)
        transport = httpx.AsyncHTTPTransport(uds=self._socket) if self._socket else None
        self._http = httpx.AsyncClient(transport=transport, **self._base)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _answer(await self._http.request(method, path, json=body, timeout=self._limit(body)))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _body(prompt: PromptLike, apart: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt, **apart}
    kind = "messages" if prompt and isinstance(prompt[0], Mapping) else "tokens"
    return {kind: list(prompt), **apart}


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        reason = f"{response.status_code} from {response.request.url}: {response.text}"
        raise httpx.HTTPStatusError(reason, request=response.request, response=response)
    answer: dict[str, Any] = response.json()
    return answer
