"""`TraceRecorder`: which chunks each request used, for `lmkv record`. No tokens, no text, no keys of chunks."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from typing import Any

from lmkv.protocols import ChunkKey, Clock
from lmkv.vllm.requests.request import RequestState

_MAX_REQUESTS = 10_000
_MAX_BYTES, _ANSWER_BYTES = 16 << 20, 1 << 20
"""Of all that is kept, and of one answer, which is made in one go; but one request at least."""
_BYTES = 200
"""Of a request besides the names of its chunks, as JSON."""
_WANTED_SECONDS = 60.0
"""How long requests are noted after somebody asked for them."""
_NAME_BYTES = 8


class TraceRecorder:
    """Notes the last requests while somebody asks for them. Noted on the scheduling thread, read on any.

    A chunk is named by a keyed hash of its key: the same within a process, and meaningless elsewhere.
    """

    def __init__(self, chunk_tokens: int, chunk_bytes: int, clock: Clock) -> None:
        self._chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._noted: deque[dict[str, Any]] = deque()
        self._count = self._bytes = 0
        self._wanted_until = float("-inf")

    def finished(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """A request has ended that used these whole chunks, head first."""
        now = self._clock()
        if now > self._wanted_until:
            return
        request = state.request
        prompt: int = getattr(request, "num_prompt_tokens", request.num_tokens)
        noted = {
            "t": round(now, 3),
            "tokens": prompt,
            "output": request.num_tokens - prompt,
            "hit": min(prompt, state.computed + state.hit_tokens),
            "keys": " ".join(map(self._name, keys)),
        }
        if state.options.hint.session:
            noted["session"] = self._name(state.options.hint.session.encode("utf-8", "surrogatepass"))
        with self._lock:
            self._noted.append(noted)
            self._count += 1
            self._bytes += _size(noted)
            while len(self._noted) > 1 and (len(self._noted) > _MAX_REQUESTS or self._bytes > _MAX_BYTES):
                self._bytes -= _size(self._noted.popleft())

    def _name(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret, digest_size=_NAME_BYTES).hexdigest()

    def since(self, number: int) -> dict[str, Any]:
        """Requests from this number on, as many as one answer has. Begins to note requests.

        `next`: the number to ask for next time; `left`: how many there are from that on already.
        """
        with self._lock:
            self._wanted_until = self._clock() + _WANTED_SECONDS
            count, first = self._count, self._count - len(self._noted)
            found = list(islice(self._noted, max(0, number - first), None))
        sums = accumulate(map(_size, found))
        most = sum(1 for _ in takewhile(lambda total: total <= _ANSWER_BYTES, sums))
        left = max(0, len(found) - max(1, most))
        return {
            "chunk_tokens": self._chunk_tokens,
            "chunk_bytes": self._chunk_bytes,
            "next": count - left,
            "left": left,
            "requests": found[: len(found) - left],
        }


def _size(noted: dict[str, Any]) -> int:
    return _BYTES + len(noted["keys"])
