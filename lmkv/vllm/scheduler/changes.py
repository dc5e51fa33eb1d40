"""`WeightChanges` keeps KV of different weights apart: the identity of the weights is part of every chunk key.

vLLM and trainers change weights and adapters while requests run. A running request then has KV of old and new weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from cachetools import LRUCache

from lmkv.vllm.plan.request import BlockTables, KeyMaker, Request
from lmkv.vllm.scheduler.audit import HitAudits, LoadAudits
from lmkv.vllm.scheduler.context import PlanContext, Planner
from lmkv.vllm.scheduler.loads import Loads


def _identities() -> Iterator[str]:
    """Yield identities for an engine that cannot ask its workers: first "", then a random one after each possible
    change of the weights.
    """
    yield ""
    while True:
        yield secrets.token_hex(16)


class WeightChanges(Planner):
    """Asks the workers for the identity of their weights, and excludes requests that run during a change of weights.

    An excluded request keeps running, but lmkv stores and loads nothing more for it, and other requests share none of
    its blocks.

    `requests`: the scheduler's requests, by id. `identify()`: a function that returns the identity of the workers'
    model. If the result is None, nothing is cached. This function is called at the start and after calls of `suspect`.
    `evict()`: a function that empties vLLM's prefix cache.
    """

    def __init__(
        self,
        context: PlanContext,
        naming: KeyMaker,
        requests: Mapping[str, Request],
        loads: Loads,
        audits: tuple[HitAudits, LoadAudits],
        identify: Callable[[], str | None] | None,
    ) -> None:
        super().__init__(context)
        self._naming, self._requests, self._loads = naming, requests, loads
        self._audit, self._load_audits = audits
        self._ask_workers = identify or partial(next, _identities())
        self.identity = self._ask_workers()
        self._suspicions = 0
        """Number of calls of `suspect` since the workers were last asked."""
        self.put_off: set[str] = set()
        """Ids of the requests that have arrived since the weights may have changed, and are not hashed yet."""
        self._across: dict[str, set[int]] = {}
        """Ids of the excluded requests, each with the blocks that no other request may share."""
        self._loading_across: set[str] = set()
        """The requests in `_across` that were loading asynchronously, and have computed nothing since the change."""
        self._served: LRUCache[str, str] = LRUCache(1024)
        """For each adapter name, the identity of the adapter that had this name last."""
        self.evict: Callable[[], None] = lambda: None
        self.evictions = 0

    # -- requests -----------------------------------------------------------------------------------------

    def puts_off(self, request_id: str) -> bool:
        """Return whether to hash a new request only at its first lookup, because the weights may have changed.

        lmkv asks the workers at that lookup, because the engine may be asleep until then.
        """
        if self._suspicions:
            self.put_off.add(request_id)
        else:
            self.put_off.discard(request_id)
        return bool(self._suspicions)

    def follow_adapter(self, request: Request) -> None:
        """If an earlier adapter had the same name, exclude the requests of the earlier adapter and empty vLLM's prefix
        cache. vLLM distinguishes adapters only by name.
        """
        name, identity = request.lora_name, request.adapter[1]
        if name is None or self._served.setdefault(name, identity) == identity:
            return
        self._served[name] = identity
        self.evict_all()
        for other in self._requests.values():
            if other.lora_name == name and other.adapter[1] != identity:
                self.leave_out(other)

    def evict_all(self) -> None:
        """Empty vLLM's prefix cache."""
        self.evictions += 1
        self.evict()

    def loads_across(self, request_id: str) -> bool:
        """Return whether another request is still loading KV of earlier weights. vLLM's prefix cache shares the loaded
        blocks when that request continues.
        """
        return bool(self._loading_across - {request_id})

    def forget(self, request_id: str) -> None:
        """Forget an ended request. If the request was excluded, remove its blocks from vLLM's prefix cache."""
        self.put_off.discard(request_id)
        self._loading_across.discard(request_id)
        if request_id in self._across:
            self._loads.evict_blocks(self._across.pop(request_id))

    def keep_apart(self, progress: Iterable[str], blocks_of: Callable[[str], BlockTables | None]) -> None:
        """Prevent other requests from sharing blocks of excluded requests, and exclude requests that already share such
        blocks.

        `progress`: ids of the requests in the step. `blocks_of(request_id)`: a function that returns a request's block
        tables, or None.
        """
        if not self._across:
            return
        tables = {name: {block for table in blocks_of(name) or () for block in table} for name in progress}
        self._across |= {request_id: blocks for request_id, blocks in tables.items() if request_id in self._across}
        earlier = set().union(*self._across.values()) - {0}
        for request_id, blocks in tables.items():
            if request_id not in self._across and blocks & earlier and request_id in self._requests:
                self._requests[request_id].leave_out()
                self._across[request_id] = blocks
        self._loads.evict_blocks(earlier)
        self._loading_across.difference_update(progress)

    # -- changes ------------------------------------------------------------------------------------------

    def suspect(self) -> None:
        """Note that the weights may have changed. The next lookup asks the workers for the identity.

        Running requests are excluded, because part of their KV comes from the earlier weights. Running stores continue,
        because their keys and their KV both belong to the earlier weights.
        """
        self._suspicions += 1
        self._load_audits.forget()
        for request in self._requests.values():
            self.leave_out(request)

    def identify(self) -> None:
        """Ask the workers for the identity of their weights, if the weights may have changed."""
        if not self._suspicions:
            return
        before, self.identity = self.identity, self._ask_workers()
        # With several changes, requests may have run with other weights in between.
        unchanged = self.identity is not None and (before, self._suspicions) == (self.identity, 1)
        self._suspicions = 0
        if unchanged:
            # Except requests whose adapter may have changed.
            with_adapter = {name for name, request in self._requests.items() if request.lora_name is not None}
            self._across = {name: blocks for name, blocks in self._across.items() if name in with_adapter}
        else:
            # vLLM may have kept its own prefix cache: KV computed on top of it has no name.
            self.evict_all()

    def leave_out(self, request: Request) -> None:
        """Exclude a request: it keeps running, but lmkv stores and loads nothing more for it, and other requests share
        none of its blocks.
        """
        request.waiting.release_lease()
        request.leave_out()
        self._audit.end(request)
        blocks = self._loads.stop(request)
        self._across.setdefault(request.request_id, blocks)
        if blocks:
            self._loading_across.add(request.request_id)

    def adapter_loaded(self, number: int, digest: str) -> None:
        """Note that the workers have loaded an adapter with this digest as number `number`. Exclude requests with this
        number and another digest.
        """
        self._naming.adapters.loaded(number, digest)
        self._leave_out_adapter(number, digest)

    def forget_adapter(self, number: int) -> None:
        """Note that adapter number `number` may have changed. Exclude the requests with this adapter. The next request
        with it asks the workers for the adapter's identity.
        """
        self._naming.adapters.forget(number)
        self._leave_out_adapter(number)

    def _leave_out_adapter(self, number: int, loaded: str = "") -> None:
        """Exclude requests with adapter number `number`, unless the adapter's digest is `loaded`."""
        for request in self._requests.values():
            if request.adapter[0] == number and request.adapter[1] != loaded and not request.unidentified:
                self.leave_out(request)
                # Also the stores of the step that the adapter was loaded for.
                self._jobs.distrust()

    def forget_media(self) -> None:
        """Forget the digests of images, sounds and videos, because vLLM has cleared its encoder cache."""
        self._naming.media.clear()
