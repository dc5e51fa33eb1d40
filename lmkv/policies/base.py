"""`PolicyBase`: the base class of eviction policies, which knows keys, parents, and which keys may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from typing import Any, Final, TypeAlias

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey

_MAX_KEYS: Final = 1 << 19
"""Largest number of keys to remember. This number of keys takes about 80 MB."""


@define(eq=False)
class Ghosts:
    """Remembers the keys and sizes of evicted chunks, in eviction order. `total_bytes`: the sum of the sizes."""

    keys: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    total_bytes: int = field(init=False, default=0)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.keys

    def add(self, key: ChunkKey, size: int) -> None:
        self.keys[key] = size
        self.total_bytes += size

    def discard(self, key: ChunkKey) -> None:
        self.total_bytes -= self.keys.pop(key, 0)

    def trim(self, limit: float) -> None:
        """Forget the oldest keys until at most `limit` bytes and half a million keys are left."""
        while self.total_bytes > limit or len(self.keys) > _MAX_KEYS:
            self.total_bytes -= self.keys.popitem(last=False)[1]


BRANCHES: Final = 8
"""A chunk with this number of children (chunks that follow it in prompts) counts as shared by several conversations."""

DEPTH: Final = 16
"""Number of chunks, from the start of a prompt, in which the policy looks for the point where conversations diverge."""

KEPT: Final = 0.5
"""Largest share of the tier that keys with a priority may keep. Higher priorities count first."""

Node: TypeAlias = list[Any]
"""The record that `PolicyBase` keeps of a key. A node is a list, because an object takes three times as long to
make.
"""
KEY, SIZE, PARENT, CHILDREN, FORK = range(5)
"""Indexes in a node. KEY: the key. SIZE: the bytes of the chunk, or 0 if only children of the key are known.

PARENT: the node of the parent, or None. CHILDREN: the number of known children. FORK: whether the node has had
`BRANCHES` children at any time.
"""


@define(eq=False)
class PolicyBase(ABC):
    """Base class of eviction policies. A subclass keeps the eviction order, with the methods `add`, `use`, `pop`,
    `put_back` and `drop`.

    The base class knows the size of each key, its parent (the chunk before it in the prompt) and its number of
    children. A request finds a chunk only together with the chunk's parent, so children are evicted first: `evict`
    skips a key that has children or that `hold` holds. A skipped parent is evicted next once its last child is gone. If
    all remaining children are held or protected, `evict` removes a parent nevertheless.

    Raises
    ------
    UsageError
        A key is inserted twice or without a size, or an unknown key is held or released.

    Notes
    -----
    Not thread-safe: the store calls its policies while it holds its lock. `evict` takes time proportional to the number
    of evicted and protected keys. Other methods take constant time per key. All policies accept hints; see
    `lmkv.protocols.TakesHints`. Keys with a priority above 0 are spared, but only up to half of the tier: beyond this
    half, the keys with the lowest priority are evicted.

    Examples
    --------
    >>> from lmkv.policies import LRU
    >>> policy = LRU()
    >>> policy.insert(b"head", size=10)
    >>> policy.insert(b"tail", size=10, parent=b"head")
    >>> policy
    <LRU: 20 evictable bytes, 0 keys held>
    >>> policy.evict(5)
    [b'tail']
    """

    nodes: dict[ChunkKey, Node] = field(init=False, factory=dict)
    """The node (record) of each known key and of each parent. `policy.nodes[key][SIZE]` is the size in bytes of a known
    key.
    """
    total_bytes: int = field(init=False, default=0)
    """Bytes of all known keys. When `pop` is called, the sum is about the capacity of the tier."""
    held: set[ChunkKey] = field(init=False, factory=set)
    passed: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """Keys that `evict` has skipped because they were held or had children. These keys are not in the subclass's
    order.
    """
    _first: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """Keys with a hint that they are to be evicted first. These keys are not in the subclass's order."""
    _ended: dict[ChunkKey, int] = field(init=False, factory=dict)
    """For each key, how many of its children have a hint that they are to be evicted first."""
    _kept: dict[ChunkKey, int] = field(init=False, factory=dict)
    """Keys with a priority above 0."""
    _last: dict[int, OrderedDict[ChunkKey, None]] = field(init=False, factory=dict)
    """For each priority, the keys that were next in the order but were not evicted because of this priority. These keys
    are not in the order.
    """
    _kept_bytes: Counter[int] = field(init=False, factory=Counter)
    """Bytes of the keys with each priority."""
    _held_bytes: int = field(init=False, default=0)
    _largest: int = field(init=False, default=0)
    _notes: bool = field(init=False)
    """Whether the subclass overrides the method `evicted`."""

    @_notes.default
    def _wants_victims(self) -> bool:
        own = type(self)
        return own.evicted is not PolicyBase.evicted or own.forget is not PolicyBase.forget

    def __repr__(self) -> str:
        free = self.total_bytes - self._held_bytes
        return f"<{type(self).__name__}: {free:,} evictable bytes, {len(self.held)} keys held>"

    def sizes(self) -> dict[ChunkKey, int]:
        """Return the size in bytes of each known key. Takes time proportional to the number of keys."""
        return {key: node[SIZE] for key, node in self.nodes.items() if node[SIZE]}

    # -- the order ----------------------------------------------------------------------------------------

    @abstractmethod
    def add(self, key: ChunkKey) -> None:
        """Add a new key to the eviction order."""

    def extend(self, keys: Sequence[ChunkKey]) -> None:
        """Add new keys to the eviction order, one after the other.

        A subclass of LRU that overrides `add` must override `extend` as well, because LRU's own `extend` does not call
        `add`.
        """
        for key in keys:
            self.add(key)

    @abstractmethod
    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Change the eviction order after a request has used the keys of a prompt, given first to last.

        The first use of a key comes from the request that stored the chunk, and is not a reuse. Unknown keys are
        ignored.
        """

    @abstractmethod
    def pop(self) -> ChunkKey | None:
        """Remove the next key to evict from the eviction order and return it, or None if the eviction order is
        empty.
        """

    @abstractmethod
    def put_back(self, key: ChunkKey) -> None:
        """Undo `pop`: make `key`, which `pop` has returned, the next key to evict again."""

    @abstractmethod
    def drop(self, key: ChunkKey) -> None:
        """Remove a key from the eviction order. The subclass keeps its other records of the key until `forget`."""

    def rejoin(self, key: ChunkKey) -> None:
        """Put a key back into the eviction order, after a release or a use. By default, the key is evicted next."""
        self.put_back(key)

    def evicted(self, key: ChunkKey, size: int) -> None:
        """Note that a key of `size` bytes, which `pop` has returned, was evicted. Some policies remember evicted
        keys.
        """
        self.forget(key)

    def forget(self, key: ChunkKey) -> None:  # noqa: B027 - most policies note nothing else
        """Delete the subclass's records of a key that is no longer in the eviction order."""

    # -- the protocol -------------------------------------------------------------------------------------

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key of `size` bytes. `parent`: the key of the chunk before `key`. Raises UsageError for a
        known key.
        """
        self.insert_chain((key,), size, (parent,))

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        """Add a prompt's evictable keys, of `size` bytes each. The last key is added first, so that it is evicted
        first.

        `parents`: for each key, the key of the previous chunk. Raises UsageError for a known key.
        """
        if size > self._largest:
            self._largest = size
        elif size < 1:
            raise UsageError(f"chunk {keys[-1].hex()} has the size {size}: a size must be at least 1 byte")
        nodes = self.nodes
        above: Node | None = None
        new: list[ChunkKey] = []
        try:
            for key, parent in zip(reversed(keys), reversed(parents), strict=True):
                # The parent of the one before, most often.
                node = above if above is not None and above[KEY] is key else nodes.get(key)
                if node is None:
                    node = nodes[key] = [key, size, None, 0, False]
                elif node[SIZE]:
                    raise UsageError(f"chunk {key.hex()} is already in the policy: insert each chunk once")
                else:
                    node[SIZE] = size
                above = None
                if parent:
                    above = nodes.get(parent)
                    if above is None:
                        above = nodes[parent] = [parent, 0, None, 0, False]
                    node[PARENT] = above
                    above[CHILDREN] += 1
                    if above[CHILDREN] >= BRANCHES:
                        above[FORK] = True
                new.append(key)
        finally:
            self.total_bytes += size * len(new)
            self.extend(new)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has used the keys of a prompt, given first to last."""
        if self._first or self.passed:
            first, passed = self._first, self.passed
            for key in reversed(keys):
                if key in first:
                    self._revive(key)
                    self.rejoin(key)
                elif key in passed:
                    # It had its turn before this use.
                    del passed[key]
                    self.rejoin(key)
        self.use(keys)

    def discard(self, key: ChunkKey) -> None:
        """Forget a key. Unknown keys are ignored."""
        node = self.nodes.get(key)
        if node is None or not node[SIZE]:
            return
        self._take_out(key)
        self.forget(key)
        self.total_bytes -= node[SIZE]
        if key in self.held:
            self.held.discard(key)
            self._held_bytes -= node[SIZE]
        self._unlink(node)

    def hold(self, key: ChunkKey) -> None:
        """Prevent the eviction of a known key until `release`. Idempotent."""
        size = self._known(key)[SIZE]
        if key not in self.held:
            self.held.add(key)
            self._held_bytes += size

    def release(self, key: ChunkKey) -> None:
        """Allow the eviction of a known key again, after `hold`. Idempotent."""
        node = self._known(key)
        if key in self.held:
            self.held.discard(key)
            self._held_bytes -= node[SIZE]
            if key in self.passed and not node[CHILDREN]:
                del self.passed[key]
                self.rejoin(key)

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove evictable keys of at least `nbytes` bytes together, except the keys in `protect`. Returns the removed
        keys.

        Returns None, and changes nothing, if there are too few evictable keys.
        """
        if not self._leaves(nbytes, protect):
            return None
        victims: list[ChunkKey] = []
        protected: list[ChunkKey] = []
        spared: list[ChunkKey] = []
        found = 0
        key: ChunkKey | None
        pop, notes, evicted = self.pop, self._notes, self.evicted
        nodes, held, passed, first, kept = self.nodes, self.held, self.passed, self._first, self._kept
        while found < nbytes:
            if first:
                given_up, key = True, self._revive(next(iter(first)))
            else:
                given_up, key = False, pop()
            if key is None:
                key = self._least(protect, spared) or self._last_resort(protect)
                node = nodes[key]
            else:
                node = nodes[key]
                if node[CHILDREN] or (held and key in held):
                    passed[key] = None
                    continue
                if protect and key in protect:
                    protected.append(key)
                    continue
                if kept and key in kept:
                    self._spare(key)
                    if self._kept_from(kept[key]) <= KEPT * (self.total_bytes - found):
                        continue
                    key = self._least(protect, spared)
                    if key is None:
                        continue
                    node = nodes[key]
            victims.append(key)
            size = node[SIZE]
            if notes:
                if given_up:
                    self.forget(key)
                else:
                    evicted(key, size)
            found += size
            self._unlink(node)
        for key in reversed(protected):
            self.put_back(key)
        for key in reversed(spared):
            self._spare(key, first=True)
        self.total_bytes -= found
        return victims

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        """Set the eviction priority of a prompt's keys, given first to last. Unknown keys are ignored.

        `priority`: above 0, the keys are evicted after others; 0 is the usual order. Below 0, the keys that
        no other prompt has move to the front of the eviction order. A key that is used again leaves the front.
        """
        if priority < 0:
            self._give_up(keys)
            return
        for key in keys:
            node = self.nodes.get(key)
            if node is not None and node[SIZE] and self._kept.get(key, 0) != priority:
                if self._take_back(key):
                    self.rejoin(key)
                if priority:
                    self._kept[key] = priority
                    self._kept_bytes[priority] += node[SIZE]

    # -- inside -------------------------------------------------------------------------------------------

    def _give_up(self, keys: Sequence[ChunkKey]) -> None:
        ended = self._ended
        for node in filter(None, map(self.nodes.get, reversed(keys))):
            key, size, parent, children, fork = node
            if fork or children > ended.get(key, 0):
                return
            if size and key not in self._first:
                self._take_out(key)
                self._first[key] = None
                if parent is not None:
                    ended[parent[KEY]] = ended.get(parent[KEY], 0) + 1

    def _revive(self, key: ChunkKey) -> ChunkKey:
        """Forget that a key is to be evicted first, because the key was used or is evicted now. Returns the key."""
        del self._first[key]
        parent = self.nodes[key][PARENT]
        if parent is not None:
            self._ended[parent[KEY]] -= 1
            if not self._ended[parent[KEY]]:
                del self._ended[parent[KEY]]
        return key

    def _take_back(self, key: ChunkKey) -> bool:
        """Undo the hints for a key. Returns True if the key is now neither in the eviction order nor in another
        queue.
        """
        spared = self._unspare(key)
        self._unkeep(key)
        if key in self._first:
            self._revive(key)
            return True
        return spared

    def _spare(self, key: ChunkKey, *, first: bool = False) -> None:
        """Add a key to the queue of its priority. `first`: whether at the front."""
        queue = self._last.setdefault(self._kept[key], OrderedDict())
        queue[key] = None
        queue.move_to_end(key, last=not first)

    def _unspare(self, key: ChunkKey) -> bool:
        """Undo `_spare`: remove a key from the queue of its priority. Returns False if the key is not in this queue."""
        queue = self._last.get(self._kept.get(key, 0))
        if queue is None or key not in queue:
            return False
        del queue[key]
        if not queue:
            del self._last[self._kept[key]]
        return True

    def _unkeep(self, key: ChunkKey) -> None:
        priority = self._kept.pop(key, 0)
        if priority:
            self._kept_bytes[priority] -= self.nodes[key][SIZE]
            if not self._kept_bytes[priority]:
                del self._kept_bytes[priority]

    def _kept_from(self, priority: int) -> int:
        """Return the total bytes of the keys with this priority or a higher one."""
        return sum(nbytes for each, nbytes in self._kept_bytes.items() if each >= priority)

    def _take_out(self, key: ChunkKey) -> None:
        """Remove a key from the eviction order, or from the queue that contains the key instead."""
        if self._take_back(key):
            return
        if key in self.passed:
            del self.passed[key]
        else:
            self.drop(key)

    def _least(self, protect: Set[ChunkKey], spared: list[ChunkKey]) -> ChunkKey | None:
        """Remove and return the next key to evict among keys with a priority, lowest priority first. None if there is
        none.

        Moves keys in `protect` to the list `spared` instead.
        """
        while self._last:
            key = next(iter(self._last[min(self._last)]))
            self._unspare(key)
            if self.nodes[key][CHILDREN] or key in self.held:
                self.passed[key] = None
            elif key in protect:
                spared.append(key)
            else:
                self._unkeep(key)
                return key
        return None

    def _last_resort(self, protect: Set[ChunkKey]) -> ChunkKey:
        """Return a key that is the parent of held or protected keys. Called only if no other key can be evicted."""
        found = next(key for key in self.passed if key not in self.held and key not in protect)
        self._take_out(found)
        return found

    def _leaves(self, nbytes: int, protect: Set[ChunkKey]) -> bool:
        """Return whether `nbytes` bytes can be evicted without the held keys and the keys in `protect`."""
        spare = self.total_bytes - self._held_bytes - nbytes
        if len(protect) * self._largest <= spare:
            return True
        nodes, held = self.nodes, self.held
        spared: int = sum(nodes[key][SIZE] for key in protect if key in nodes and key not in held)
        return spared <= spare

    def _unlink(self, node: Node) -> None:
        """Remove the record of a forgotten key. If this was its parent's last child, the parent becomes evictable."""
        key, _, parent, children, _ = node
        if children:
            node[:] = key, 0, None, children, False
        else:
            del self.nodes[key]
        if parent is None:
            return
        parent[CHILDREN] -= 1
        if not parent[CHILDREN]:
            key = parent[KEY]
            if not parent[SIZE]:
                del self.nodes[key]
            elif key in self.passed and key not in self.held:
                del self.passed[key]
                if key in self._kept:
                    # A chain without its end goes before others lose theirs.
                    self._spare(key, first=True)
                else:
                    self.put_back(key)

    def _known(self, key: ChunkKey) -> Node:
        node = self.nodes.get(key)
        if node is None or not node[SIZE]:
            raise UsageError(f"chunk {key.hex()} is not in the policy")
        return node
