"""`Peers`: the first engine's service asks the other engines of its server, and adds up their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any

import httpx
from starlette.concurrency import run_in_threadpool

from lmkv.agent.client import AsyncClient
from lmkv.errors import LmkvError

Answer = dict[str, Any]
Call = Callable[[], Answer | None] | Callable[[], Awaitable[Answer]]
"""A plain function runs in one of a few threads, so a call that waits for long should be a coroutine function."""
Url = Callable[[int], str]

_RETRY, _AGAIN = 1.0, 10.0
_MAX_ENGINES = 1024
_REFUSED = (400, 422)
"""Status codes of mistakes that the caller has to correct."""


class PeerError(LmkvError):
    """An engine does not exist, does not answer, or refuses. `status`: the HTTP status to answer with."""

    def __init__(self, reason: str, status: int = 503) -> None:
        super().__init__(reason)
        self.status = status


class Peers:
    """The engines of one server, by number. All but the first announce themselves to it, again and again.

    `number`: this engine's. `url`: gives the URL of an engine's service. Called on the service's event loop only.
    """

    def __init__(self, number: int = 0, url: Url | None = None, token: str | None = None) -> None:
        self.number = number
        self._url = url
        self._token = token
        self._others: dict[int, AsyncClient] = {}

    def __repr__(self) -> str:
        return f"<Peers: {self.number} and {len(self._others)} others>"

    def announced(self, number: int) -> None:
        """Note that another engine answers from now on."""
        if self._url is not None and 0 < number < _MAX_ENGINES and number not in (self.number, *self._others):
            self._others[number] = AsyncClient(self._url(number), self._token)

    async def announce(self) -> None:
        """Announce this engine to the first one for ever, because that one may restart."""
        if self._url is None or not self.number:
            return
        async with AsyncClient(self._url(0), self._token) as first:
            while True:
                try:
                    await first.announce(self.number)
                    await asyncio.sleep(_AGAIN)
                except httpx.HTTPError:
                    await asyncio.sleep(_RETRY)

    async def ask(self, call: Call, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[int, Answer]:
        """Answers by engine; `call()` gives this one's. Engines that answer 404 are omitted; others give `unavailable`.

        An `engine` in the body is asked alone. Raises PeerError when it does not exist or does not answer.
        """
        body = dict(body or {})
        wanted = body.pop("engine", None)
        numbers = [self.number, *sorted(self._others)]
        if wanted not in (None, *numbers):
            raise PeerError(f"there is no such engine; there are {', '.join(map(str, numbers))}", 400)
        asked = numbers if wanted is None else [wanted]
        others = [self._other(number, method, path, body) for number in asked if number != self.number]
        own = call if iscoroutinefunction(call) else lambda: run_in_threadpool(call)
        mine = [own()] if self.number in asked else []
        answers = await asyncio.gather(*mine, *others)
        found = {number: answer for number, answer in zip(asked, answers, strict=True) if answer is not None}
        if wanted is not None and "unavailable" in found.get(wanted, {}):
            raise PeerError(f"engine {wanted} is unavailable: {found[wanted]['unavailable']}")
        return found

    async def _other(self, number: int, method: str, path: str, body: Mapping[str, Any]) -> Answer | None:
        try:
            return await self._others[number].send(method, path, body if method == "POST" else None)
        except httpx.HTTPStatusError as error:
            if (status := error.response.status_code) in _REFUSED:
                raise PeerError(_detail(error.response), status) from None
            return None if status == 404 else {"unavailable": str(error)}
        except (httpx.HTTPError, ValueError) as error:
            # ValueError: the body or the answer is no JSON.
            return {"unavailable": f"{type(error).__name__}: {error}"}

    async def close(self) -> None:
        for other in self._others.values():
            await other.aclose()


def _detail(response: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(response.json()["detail"])
    return response.text


# -- adding up ----------------------------------------------------------------------------------------------

_LEADING = ("hit_tokens", "ready_tokens", "pinned_tokens")
_SUMS = ("deleted_chunks", "unpinned_chunks", "lookup_tokens", "leased", "pinned", "writing", "loading", "pending_io")
_OF_THE_MEDIUM = ("chunks", "used_bytes", "capacity_bytes")
_BREAKER = ("closed", "half-open", "open")


def answering(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """The answers of the engines that could be reached."""
    return {number: answer for number, answer in answers.items() if "unavailable" not in answer}


def merged(answers: Mapping[int, Answer]) -> Answer:
    """The only answer, or the best of several with summed totals and each answer in `engines`."""
    here = answering(answers)
    if len(answers) == 1 and here:
        return next(iter(here.values()))
    best = max(here, key=lambda number: max(here[number].get(name, 0) for name in _LEADING), default=None)
    if best is None:
        raise PeerError("no engine answers")
    whole = {"engine": best, **here[best]}
    whole |= {name: sum(answer[name] for answer in here.values()) for name in _SUMS if name in whole}
    if "done" in whole:
        whole["done"] = all(answer["done"] for answer in here.values())
    return {**whole, "engines": [{"engine": number, **answer} for number, answer in sorted(answers.items())]}


def merged_stats(answers: Mapping[int, Answer]) -> Answer:
    """Counters of all engines. Host memory is summed; the lower tiers are shared, so their size counts once."""
    whole = merged(answers)
    if "engines" not in whole:
        return whole
    here = answering(answers).values()
    tiers = zip(*(answer["tiers"] for answer in here), strict=False)
    whole["tiers"] = [_merged_tier(each, first=not number) for number, each in enumerate(tiers)]
    whole["hit_tokens"] = sum(answer["hit_tokens"] for answer in here)
    whole["tenants"] = {tier: _summed(answer["tenants"][tier] for answer in here) for tier in whole["tenants"]}
    whole["loads_off"] = any(answer["loads_off"] for answer in here)
    del whole["engine"]
    return whole


def _summed(used: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(each) for each in used), Counter[str]()))


def _merged_tier(tiers: Iterable[Answer], *, first: bool) -> Answer:
    columns = {name: [tier[name] for tier in tiers] for name in next(iter(tiers))}
    return {name: _merged_value(name, values, first=first) for name, values in columns.items()}


def _merged_value(name: str, values: list[Any], *, first: bool) -> Any:
    if name == "name" or None in values:
        return values[0]
    if isinstance(values[0], str):
        return max(values, key=_BREAKER.index)
    return max(values) if name in _OF_THE_MEDIUM and not first else sum(values)


def merged_requests(answers: Mapping[int, Answer], most: int) -> Answer:
    """The `most` newest reports of all engines, each with its `engine`."""
    here = answering(answers)
    requests = [{"engine": number, **each} for number, answer in here.items() for each in answer["requests"]]
    requests.sort(key=lambda each: each["time"], reverse=True)
    totals = {name: sum(answer[name] for answer in here.values()) for name in ("lookup_tokens", "hit_tokens")}
    failed = {str(number): answer["unavailable"] for number, answer in answers.items() if number not in here}
    return {**totals, "requests": requests[:most], **({"unavailable": failed} if failed else {})}
