"""Wraps policies, admission filters and observers of other packages: their exceptions end no call and no store.

The first exception is logged. All are called under the store's lock.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from attrs import define, field, frozen

from lmkv.errors import safe_repr
from lmkv.protocols import Admission, ChunkKey, DividesTier, LabelsKeys, Policy, SeesPrompts, TakesHints
from lmkv.store.guards import attempt

logger = logging.getLogger(__name__)
MAX_GIVEN_UP: Final = 1 << 16
"""Most chunks remembered that were given up on their way to a tier."""
T = TypeVar("T")


class StoreObserver(Protocol):
    """Notified when a tier begins to serve a chunk, and when it stops: the chunk was evicted, deleted or lost.

    Called under the store's lock, on any thread that changes an index. A method takes constant time, and must not
    wait, call the store or raise. Keys of more than 32 bytes in a lower tier belong to other namespaces.
    """

    def stored(self, tier: str, key: ChunkKey) -> None: ...

    def removed(self, tier: str, key: ChunkKey) -> None: ...


def _ignore(keys: Sequence[ChunkKey], what: Any) -> None: ...


@define(eq=False)
class Plain:
    """The least recently used key goes first, and of a chain its tail. It knows no parents, and never raises."""

    _sizes: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    _held: set[ChunkKey] = field(init=False, factory=set)

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            self._sizes[key] = size

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def discard(self, key: ChunkKey) -> None:
        self._sizes.pop(key, None)
        self._held.discard(key)

    def hold(self, key: ChunkKey) -> None:
        self._held.add(key)

    def release(self, key: ChunkKey) -> None:
        self._held.discard(key)
        self.touch([key])

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        victims: list[ChunkKey] = []
        for key, size in self._sizes.items():
            if nbytes <= 0:
                break
            if key not in self._held and key not in protect:
                victims.append(key)
                nbytes -= size
        if nbytes > 0:
            return None
        for key in victims:
            del self._sizes[key]
        return victims

    def sizes(self) -> dict[ChunkKey, int]:
        """Bytes of each known key."""
        return dict(self._sizes)


@frozen
class Content:
    """A tier's content, for a new policy. `chains`: arguments of `Policy.insert_chain`, least recently used first."""

    chains: Iterable[tuple[Sequence[ChunkKey], int, Sequence[ChunkKey]]]
    held: Iterable[ChunkKey]


class Order:
    """A policy, replaced by a `Plain` one when it raises, with one line in the log.

    It also passes hints about chunks that arrive or return: `priority_of` for those in `wished`, and which chunks were
    given up on their way. `content`: of the tier. `freed`: bytes of these chunks, 0 if one is in use or absent. `has`:
    whether the policy knows a chunk. Called under the store's lock.
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        content: Callable[[], Content],
        freed: Callable[[Sequence[ChunkKey]], int],
        has: Callable[[ChunkKey], bool],
    ) -> None:
        self.policy = policy
        self._name = name
        self._content, self._freed, self._has = content, freed, has
        self.wished: Mapping[ChunkKey, object] = {}
        self.priority_of: Callable[[ChunkKey], int] = lambda key: 0
        self._given_up: OrderedDict[ChunkKey, None] = OrderedDict()
        self._new: Policy | None = attempt(lambda: copy.deepcopy(policy), lambda error: None)
        """As it was before the first key."""
        self._telling = False
        # On the instance, because `isinstance` looks for the attributes and not every policy has them.
        if isinstance(policy, TakesHints):
            self.hint = self._hint
        if isinstance(policy, LabelsKeys):
            self.label = partial(self._tell, "label")
            self.used_bytes = self._used_bytes

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        self._do(lambda policy: policy.insert_chain(keys, size, parents))
        if self.wished or self._given_up:
            for key in reversed(keys):
                given_up = self._given_up.pop(key, self) is None
                if priority := self.priority_of(key) if key in self.wished else -given_up:
                    self._tell("hint", (key,), priority)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys if self._given_up else ():
            self._given_up.pop(key, None)
        self._do(lambda policy: policy.touch(keys))

    def discard(self, key: ChunkKey) -> None:
        try:
            self.policy.discard(key)
        except BaseException as error:
            self._after(error).discard(key)

    def hold(self, key: ChunkKey) -> None:
        try:
            self.policy.hold(key)
        except BaseException as error:
            self._after(error).hold(key)

    def release(self, key: ChunkKey) -> None:
        try:
            self.policy.release(key)
        except BaseException as error:
            self._after(error).release(key)

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        if self._telling:
            # A hint was cut short.
            self.rebuild()
        checked = partial(self._evicted, nbytes, protect)
        return attempt(checked, lambda error: self._replace(error).evict(nbytes, protect))

    def _evicted(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey]) -> list[ChunkKey] | None:
        victims = self.policy.evict(nbytes, protect)
        if victims is not None and (self._freed(victims) < nbytes or len(set(victims)) < len(victims)):
            raise ValueError("it has evicted too little, or what is in use or not there")
        return victims

    def part_of(self, key: ChunkKey, parent: ChunkKey) -> tuple[str, float]:
        """See `DividesTier`. Without quotas, no chunk has a tenant."""
        return self._do(lambda policy: policy.part_of(key, parent) if isinstance(policy, DividesTier) else ("", 1.0))

    def _hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        for key in keys if priority < 0 or self._given_up else ():
            self._given_up.pop(key, None)
            if priority < 0 and not self._has(key):
                self._given_up[key] = None
        while len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)
        self._tell("hint", keys, priority)

    def _tell(self, verb: str, keys: Sequence[ChunkKey], what: Any) -> None:
        self._telling = True
        self._do(lambda policy: getattr(policy, verb, _ignore)(keys, what))
        self._telling = False

    def _used_bytes(self) -> Mapping[str, int]:
        return self._do(lambda policy: dict(policy.used_bytes()) if isinstance(policy, LabelsKeys) else {})

    def _after(self, error: BaseException) -> Policy:
        """The replacement of a policy that raised. Re-raises Ctrl-C. For calls about one chunk, where `_do` is slow."""

        def again() -> Policy:
            raise error

        return attempt(again, self._replace)

    def _do(self, call: Callable[[Policy], T]) -> T:
        return attempt(lambda: call(self.policy), lambda error: call(self._replace(error)))

    def rebuild(self) -> None:
        """Start a new policy of the same kind from the tier's content."""
        # A new object each time: an exception may have left the old one in any state.
        policy = attempt(lambda: copy.deepcopy(self._new), lambda error: None) or Plain()
        self.policy = attempt(lambda: self._filled(policy, self.policy), self._replace)
        self._telling = False

    def _filled(self, policy: Policy, before: Policy | None = None) -> Policy:
        """`before`: knows the tenants of the chunks, with quotas."""
        content = self._content()
        for keys, size, parents in content.chains:
            if isinstance(before, DividesTier) and isinstance(policy, LabelsKeys):
                policy.label(keys, [before.part_of(keys[0])[0]])
            policy.insert_chain(keys, size, parents)
        for key in content.held:
            policy.hold(key)
        return policy

    def _replace(self, error: Exception) -> Policy:
        name, self._new = type(self.policy).__name__, None
        logger.error("lmkv: tier %r goes on with LRU: its policy %s failed: %s", self._name, name, safe_repr(error))
        self.policy = self._filled(Plain())
        return self.policy


@define(eq=False)
class GuardedAdmission:
    """A filter that admits nothing when it raises."""

    _admission: Admission
    _tier: str
    _told: bool = field(init=False, default=False)

    @property
    def sees_prompts(self) -> bool:
        return isinstance(self._admission, SeesPrompts)

    def admit(self, key: ChunkKey) -> bool:
        return attempt(lambda: bool(self._admission.admit(key)), self._refuse)

    def prompt(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        if isinstance(admission := self._admission, SeesPrompts):
            attempt(lambda: admission.prompt(keys, tokens), self._tell)

    def _refuse(self, error: Exception) -> bool:
        self._tell(error)
        return False

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning("lmkv: tier %r: its admission failed: %s", self._tier, safe_repr(error))


@define(eq=False)
class GuardedObserver:
    """An observer that is not notified again after it has raised."""

    _observer: StoreObserver
    _ended: bool = field(init=False, default=False)

    def stored(self, tier: str, key: ChunkKey) -> None:
        if not self._ended:
            attempt(lambda: self._observer.stored(tier, key), self._end)

    def removed(self, tier: str, key: ChunkKey) -> None:
        if not self._ended:
            attempt(lambda: self._observer.removed(tier, key), self._end)

    def _end(self, error: Exception) -> None:
        self._ended = True
        logger.error("lmkv: an observer of a store is told nothing more: it failed: %s", safe_repr(error))
