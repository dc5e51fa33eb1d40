"""`Peers`: sends requests of a server's first engine to the other engines, and combines the responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from inspect import iscoroutinefunction
from itertools import zip_longest
from typing import Annotated, Any, ClassVar

import httpx
from attrs import define, field, fields, resolve_types
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from lmkv.agent.client import AsyncClient
from lmkv.errors import LmkvError, printable
from lmkv.protocols import Clock
from lmkv.store.health import TierStats

# -- the answers ------------------------------------------------------------------------------------------


Number = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Real = Annotated[float, Field(allow_inf_nan=False)]
_TYPES: dict[Any, Any] = {int: Number, int | None: Number | None}


class _Answer(BaseModel):
    """A pydantic model of an engine's response, which drops unknown fields."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)


def _answer(**types: Any) -> Any:
    """Return a pydantic model in which all of these fields are required."""
    required: Any = {name: (_TYPES.get(kind, kind), ...) for name, kind in types.items()}
    return create_model("Answer", __base__=_Answer, **required)


_Tier: Any = _answer(**{each.name: each.type for each in fields(resolve_types(TierStats))})


class Stats(_Answer):
    time: Real
    tiers: list[_Tier] = Field(min_length=1)
    leased: Number
    pinned: Number
    writing: Number
    loading: Number
    pending_io: Number
    tenants: dict[str, dict[str, Number]]
    loads_off: bool
    lookup_tokens: Number
    hit_tokens: Number


class Missed(_Answer):
    reason: str
    tokens: Number
    tier: str = ""
    seconds_ago: Real = 0.0


class Report(_Answer):
    request: str
    time: Real
    running: bool
    tokens: Number
    vllm_tokens: Number
    hit_tokens: Number
    sources: dict[str, Number]
    wait_seconds: Real
    load_bytes: Number
    load_seconds: Real
    missed: Missed | None = None


class Requests(_Answer):
    lookup_tokens: Number
    hit_tokens: Number
    requests: list[Report]


class Explained(Report):
    explanation: str
    parts: list[Explained] = []


_PREFETCHED = _answer(id=str, done=bool, found_tokens=int, ready_tokens=int)
_ANSWERS: dict[tuple[str, str], type[_Answer]] = {
    ("POST", "lookup"): _answer(total_tokens=int, hit_tokens=int, sources=dict[str, Number]),
    ("POST", "prefetch"): _PREFETCHED,
    ("GET", "prefetch"): _PREFETCHED,
    ("DELETE", "prefetch"): _answer(id=str, cancelled=bool),
    ("DELETE", "session"): _answer(session=str, ended=bool),
    ("POST", "pin"): _answer(pinned_tokens=int, seconds=Real),
    ("POST", "unpin"): _answer(unpinned_chunks=int),
    ("POST", "clear"): _answer(deleted_chunks=int),
    ("GET", "stats"): Stats,
    ("GET", "requests"): Requests,
    ("GET", "explain"): Explained,
}


class NoAnswerError(Exception):
    """An engine has sent bytes that are not a valid response to the request."""


def checked(method: str, path: str, data: bytes) -> dict[str, Any]:
    """Return the fields of an engine's response to a forwarded request. Raises NoAnswerError for invalid `data`."""
    try:
        answer = _ANSWERS[method, path.split("/")[2]].model_validate_json(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise NoAnswerError(f"the answer is not from this version of lmkv: {printable(reason)}") from None
    return answer.model_dump(exclude_unset=True)


# -- the other engines ------------------------------------------------------------------------------------


logger = logging.getLogger("lmkv.agent")

Answer = dict[str, Any]
Call = Callable[[], Answer | None] | Callable[[], Awaitable[Answer | None]]
"""A call of this engine's service. A plain function waits for a worker thread; a coroutine function runs immediately
in the event loop.
"""
Url = Callable[[int], str]

_RETRY, _AGAIN = 1.0, 10.0
_FORGET = 300.0
"""Seconds without an answer after which an engine is forgotten."""
_MAX_ENGINES = 1024
_MAX_BYTES = 8 << 20
_REFUSED = (400, 422)
"""HTTP status codes that mean a mistake of the caller."""


class PeerError(LmkvError):
    """An engine does not exist, does not respond, or refuses a request. `status`: the HTTP status to return to the
    caller.
    """

    def __init__(self, reason: str, status: int = 503) -> None:
        super().__init__(reason)
        self.status = status


@define
class _Other:
    """Another engine of the server. `away`: why the engine is not asked now, or "". `since`: when the engine became
    away.
    """

    client: AsyncClient
    away: str = ""
    since: float = 0.0


@define(eq=False, repr=False)
class Peers:
    """The engines of one server, by number. Each engine except the first announces itself to the first engine
    repeatedly.

    `number`: the number of this engine. `url`: a function from an engine's number to the URL of the engine's service.
    The function may raise OSError. The URL must lead to a socket of this user, because `Peers` sends a token to it.
    All methods are called on the service's event loop.
    """

    number: int = 0
    _url: Url | None = None
    _token: str | None = field(default=None, repr=False)
    _clock: Clock = time.monotonic
    _others: dict[int, _Other] = field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<Peers: {self.number} and {len(self._others)} others>"

    def announced(self, number: int) -> None:
        """Note that engine `number` runs, so that `ask` includes this number. An impossible number is ignored.

        Raises PeerError if there is no private folder for the engines' sockets.
        """
        if number in self._others:
            self._others[number].away = ""
        elif self._url is not None and 0 < number < _MAX_ENGINES and number != self.number:
            self._others[number] = _Other(self._client_of(self._url, number))

    def _client_of(self, url: Url, number: int) -> AsyncClient:
        try:
            return AsyncClient(url(number), self._token, most=_MAX_BYTES)
        except OSError as error:
            raise PeerError(f"the engines of this server cannot find each other: {error}") from error

    async def announce(self) -> None:
        """Announce this engine to the first engine, again and again, because the first engine may restart."""
        failed = False
        while self._url is not None and self.number:
            pause = _RETRY
            try:
                async with self._client_of(self._url, 0) as first:
                    await first.announce(self.number)
                pause = _AGAIN
            except httpx.HTTPError:
                # It is not there yet, or is about to restart.
                pass
            except Exception as error:
                if not failed:
                    text = "lmkv: this engine cannot announce itself to the server's first engine: %s"
                    logger.warning(text, printable(str(error)))
                failed = True
            await asyncio.sleep(pause)

    async def ask(self, call: Call, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[int, Answer]:
        """Return the response of each engine, by engine number. An engine that responds with status 404 is left out.

        `call`: a function that returns the response of this process's engine. If another engine cannot be reached, its
        response has the reason in `unavailable`. If `body` has the field `engine`, only the engine with this number is
        asked. Raises PeerError if that engine does not respond.
        """
        await self._forget()
        body = dict(body or {})
        wanted = body.pop("engine", None)
        numbers = [self.number, *sorted(self._others)]
        if wanted not in (None, *numbers):
            raise PeerError(f"there is no engine {wanted}; the engines are {', '.join(map(str, numbers))}", 400)
        asked = numbers if wanted is None else [wanted]
        others = [self._other(number, method, path, body) for number in asked if number != self.number]
        loop = asyncio.get_running_loop()
        own = call if iscoroutinefunction(call) else lambda: loop.run_in_executor(None, call)
        mine = [own()] if self.number in asked else []
        answers = await asyncio.gather(*mine, *others)
        found = {number: answer for number, answer in zip(asked, answers, strict=True) if answer is not None}
        if wanted is not None and "unavailable" in found.get(wanted, {}):
            raise PeerError(f"engine {wanted} is unavailable: {found[wanted]['unavailable']}")
        return found

    async def _other(self, number: int, method: str, path: str, body: Mapping[str, Any]) -> Answer | None:
        other = self._others[number]
        if not other.away:
            try:
                return checked(
                    method, path, await other.client.receive(method, path, body if body or method == "POST" else None)
                )
            except httpx.HTTPStatusError as error:
                if (status := error.response.status_code) in _REFUSED:
                    raise PeerError(_detail(error.response), status) from None
                return None if status == 404 else {"unavailable": printable(str(error))}
            except UnicodeEncodeError:
                raise PeerError("the body is not text in UTF-8", 400) from None
            except Exception as error:
                # Nobody answers, or something else does: it will announce itself when it is there again.
                other.away, other.since = printable(f"{type(error).__name__}: {error}"), self._clock()
        return {"unavailable": other.away}

    async def _forget(self) -> None:
        """Remove engines that have not responded for five minutes, so that later responses do not list them as
        unavailable.
        """
        for number, other in list(self._others.items()):
            if other.away and self._clock() > other.since + _FORGET:
                del self._others[number]
                await other.client.aclose()

    async def close(self) -> None:
        for other in self._others.values():
            await other.client.aclose()


def _detail(response: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return printable(str(response.json()["detail"]))
    return printable(response.text)


# -- adding up ----------------------------------------------------------------------------------------------

_LEADING = ("hit_tokens", "ready_tokens", "pinned_tokens")
_SUMS = ("deleted_chunks", "unpinned_chunks", "lookup_tokens", "leased", "pinned", "writing", "loading", "pending_io")
_OF_THE_MEDIUM = ("chunks", "used_bytes", "capacity_bytes")
_BREAKER = ("closed", "half-open", "open")


def answering(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """Return the responses of the engines that could be reached."""
    return {number: answer for number, answer in answers.items() if "unavailable" not in answer}


def merged(answers: Mapping[int, Answer]) -> Answer:
    """Return the best engine's response with the totals of all engines, and all responses in `engines`.

    The best engine has the most hit, ready or pinned tokens. A single response is returned unchanged.
    """
    here = answering(answers)
    if len(answers) == 1 and here:
        return next(iter(here.values()))
    best = max(here, key=lambda number: max(here[number].get(name, 0) for name in _LEADING), default=None)
    if best is None:
        raise PeerError("no engine answers: see the log of the server")
    whole = {"engine": best, **here[best]}
    whole |= {name: sum(answer[name] for answer in here.values()) for name in _SUMS if name in whole}
    if "done" in whole:
        whole["done"] = all(answer["done"] for answer in here.values())
    return {**whole, "engines": [{"engine": number, **answer} for number, answer in sorted(answers.items())]}


def merged_stats(answers: Mapping[int, Answer]) -> Answer:
    """Return the counters of all engines, combined into one response.

    Counters of host memory are added. Engines share the lower tiers, so the chunks and bytes of a lower tier count only
    once.
    """
    whole = merged(answers)
    if "engines" not in whole:
        return whole
    here = answering(answers).values()
    tiers = zip_longest(*(answer["tiers"] for answer in here))
    whole["tiers"] = [_merged_tier([*filter(None, each)], first=not number) for number, each in enumerate(tiers)]
    whole["hit_tokens"] = sum(answer["hit_tokens"] for answer in here)
    whole["tenants"] = {tier: _summed(answer["tenants"].get(tier, {}) for answer in here) for tier in whole["tenants"]}
    whole["loads_off"] = any(answer["loads_off"] for answer in here)
    del whole["engine"]
    return whole


def _summed(used: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(each) for each in used), Counter[str]()))


def _merged_tier(tiers: list[Answer], *, first: bool) -> Answer:
    columns = {name: [tier[name] for tier in tiers] for name in tiers[0]}
    return {name: _merged_value(name, values, first=first) for name, values in columns.items()}


def _merged_value(name: str, values: list[Any], *, first: bool) -> Any:
    if name == "name" or None in values:
        return values[0]
    if isinstance(values[0], str):
        return max(values, key=_BREAKER.index)
    return max(values) if name in _OF_THE_MEDIUM and not first else sum(values)


def merged_requests(answers: Mapping[int, Answer], most: int) -> Answer:
    """Return the `most` newest request reports of all engines. The field `engine` of a report is the engine's
    number.
    """
    here = answering(answers)
    requests = [{"engine": number, **each} for number, answer in here.items() for each in answer["requests"]]
    requests.sort(key=lambda each: each["time"], reverse=True)
    totals = {name: sum(answer[name] for answer in here.values()) for name in ("lookup_tokens", "hit_tokens")}
    failed = {str(number): answer["unavailable"] for number, answer in answers.items() if number not in here}
    return {**totals, "requests": requests[:most], **({"unavailable": failed} if failed else {})}
