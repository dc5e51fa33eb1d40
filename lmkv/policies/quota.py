"""`Quotas`: a policy that keeps a share of a tier for each tenant, even if other tenants store many chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey, Policy, TakesHints

NOBODY = ""
"""The tenant of unlabelled chunks. `NOBODY` has no quota, and uses the space that other tenants leave."""


@define(eq=False)
class Quotas:
    """A policy that gives each tenant a share (quota) of the tier. The tenant that exceeds its quota by the most bytes
    loses chunks first.

    A tenant may use more than its quota while no other tenant needs the space. A tenant within its quota loses chunks
    only if no tenant exceeds its quota, or if all chunks of the exceeding tenants are held.

    Parameters
    ----------
    make : callable
        A function that returns a new eviction policy. Each tenant gets a separate policy.
    quotas : dict[str, float]
        The share of the tier for each tenant, 0 to 1. The sum is at most 1.

    Raises
    ------
    UsageError
        A share is negative, or the sum exceeds 1.

    Notes
    -----
    A chunk belongs to the tenant that `label` names, or else to the tenant of the chunk before it. Other chunks, such
    as all chunks after a restart, belong to no tenant until a tenant's request uses such a chunk.

    Examples
    --------
    >>> from lmkv.policies import LRU
    >>> policy = Quotas(LRU, {"alice": 0.5})
    >>> policy.label([b"a"], ["alice"])
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.evict(15), policy.used_bytes()
    ([b'b', b'c'], {'alice': 10})
    """

    make: Callable[[], Policy]
    quotas: Mapping[str, float] = field()
    total_bytes: int = field(init=False, default=0)
    _policies: dict[str, Policy] = field(init=False, factory=dict)
    _used: dict[str, int] = field(init=False, factory=dict)
    _free: dict[str, int] = field(init=False, factory=dict)
    """Bytes of each tenant's chunks that are not held."""
    _tenants: dict[ChunkKey, str] = field(init=False, factory=dict)
    """The tenant of each known key, and of each key that was labelled lately."""
    _labelled: dict[str, dict[ChunkKey, None]] = field(init=False, factory=dict)
    """For each tenant, the keys that were labelled and are not inserted yet."""
    _sizes: dict[ChunkKey, int] = field(init=False, factory=dict)
    _held: set[ChunkKey] = field(init=False, factory=set)

    @quotas.validator
    def _check(self, _: object, quotas: Mapping[str, float]) -> None:
        if any(quota < 0 for quota in quotas.values()) or sum(quotas.values()) > 1 + 1e-9:
            raise UsageError(f"quotas must be 0 or more, and add up to 100 % at most, not {dict(quotas)}")

    def __repr__(self) -> str:
        return f"<Quotas: {len(self._sizes)} keys of {len(self._policies)} tenants>"

    def used_bytes(self) -> dict[str, int]:
        """Return `{tenant: bytes}`, without tenants that use no bytes."""
        return {tenant: used for tenant, used in self._used.items() if used}

    def part_of(self, key: ChunkKey, parent: ChunkKey = b"") -> tuple[str, float]:
        """Return a chunk's tenant and the tenant's share of the tier, 0 to 1.

        A chunk without a tenant has its parent's tenant. If neither has a tenant, the tenant is "", and the share is
        the rest of the tier.
        """
        tenant = self._tenants.get(key, self._tenants.get(parent, NOBODY))
        return tenant, self.quotas.get(tenant, max(0.0, 1.0 - sum(self.quotas.values())))

    def label(self, keys: Sequence[ChunkKey], names: Sequence[str]) -> None:
        """Assign a prompt's chunks, given first to last, to the first tenant in `names` that has a quota.

        Chunks in the tier that belong to a tenant already are not reassigned.
        """
        tenant = next((name for name in names if name in self.quotas), NOBODY)
        if tenant == NOBODY:
            return
        labelled = self._labelled.setdefault(tenant, {})
        for at in reversed(range(len(keys))):
            key = keys[at]
            if key not in self._sizes:
                self._labelled.get(self._tenants.get(key, NOBODY), {}).pop(key, None)
                self._tenants[key] = tenant
                labelled[key] = None
            elif self._tenants[key] == NOBODY:
                self._move(key, tenant, keys[at - 1] if at else b"")
        while len(labelled) > _MAX_LABELLED:
            oldest = next(iter(labelled))
            del labelled[oldest]
            if oldest not in self._sizes:
                self._tenants.pop(oldest, None)

    def _move(self, key: ChunkKey, tenant: str, parent: ChunkKey) -> None:
        size, held = self._sizes[key], key in self._held
        self.discard(key)
        self._tenants[key] = tenant
        self.insert(key, size, parent)
        if held:
            self.hold(key)

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        tenant, _ = self.part_of(key, parent)
        self._of(tenant).insert_chain((key,), size, (parent,))
        self._labelled.get(tenant, {}).pop(key, None)
        self._tenants[key] = tenant
        self._sizes[key] = size
        self.total_bytes += size
        self._used[tenant] = self._used.get(tenant, 0) + size
        self._free[tenant] = self._free.get(tenant, 0) + size

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            self.insert(key, size, parent)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has used a prompt's keys, given first to last. Each tenant's policy learns of the use,
        because tenants may share the first chunks of their prompts.
        """
        for tenant in {self._tenants[key] for key in keys if key in self._sizes}:
            self._policies[tenant].touch(keys)

    def discard(self, key: ChunkKey) -> None:
        if key in self._sizes:
            self._policies[self._tenants[key]].discard(key)
            self._forget(key)

    def hold(self, key: ChunkKey) -> None:
        self._of(self._tenants.get(key, NOBODY)).hold(key)
        if key not in self._held:
            self._held.add(key)
            self._free[self._tenants[key]] -= self._sizes[key]

    def release(self, key: ChunkKey) -> None:
        self._of(self._tenants.get(key, NOBODY)).release(key)
        if key in self._held:
            self._held.discard(key)
            self._free[self._tenants[key]] += self._sizes[key]

    def hint(self, keys: Sequence[ChunkKey], priority: int) -> None:
        for tenant in {self._tenants.get(key, NOBODY) for key in keys}:
            policy = self._of(tenant)
            if isinstance(policy, TakesHints):
                policy.hint(keys, priority)

    def evict(self, nbytes: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        """Remove and return keys of at least `nbytes` bytes in total, but no key in `protect`.

        Tenants that exceed their quota lose keys first. Returns None, and changes nothing, if too few keys can be
        evicted.
        """
        spared: dict[str, int] = {}
        for key in protect:
            if key in self._sizes and key not in self._held:
                tenant = self._tenants[key]
                spared[tenant] = spared.get(tenant, 0) + self._sizes[key]
        free = {tenant: bytes_ - spared.get(tenant, 0) for tenant, bytes_ in self._free.items()}
        if sum(free.values()) < nbytes:
            return None
        capacity = self.total_bytes
        over = {tenant: self._used[tenant] - self.quotas.get(tenant, 0.0) * capacity for tenant in free}
        victims: list[ChunkKey] = []
        found = 0
        while found < nbytes:
            able = [tenant for tenant in free if free[tenant] > 0]
            tenant = max(able, key=over.__getitem__)
            # Only until it is at its quota, or over it by no more than the next tenant is.
            others = sorted((over[other] for other in able if other != tenant), reverse=True)
            until = max(others[0], 0.0) if others and others[0] < over[tenant] else over[tenant]
            wanted = min(nbytes - found, free[tenant], max(1, int(over[tenant] - until) or nbytes - found))
            evicted = self._policies[tenant].evict(wanted, protect)
            assert evicted
            freed = sum(self._sizes[key] for key in evicted)
            for key in evicted:
                self._forget(key)
            victims += evicted
            found, free[tenant], over[tenant] = found + freed, free[tenant] - freed, over[tenant] - freed
        return victims

    def _of(self, tenant: str) -> Policy:
        policy = self._policies.get(tenant)
        if policy is None:
            policy = self._policies[tenant] = self.make()
        return policy

    def _forget(self, key: ChunkKey) -> None:
        tenant, size = self._tenants.pop(key), self._sizes.pop(key)
        self.total_bytes -= size
        self._used[tenant] -= size
        if key in self._held:
            self._held.discard(key)
        else:
            self._free[tenant] -= size


_MAX_LABELLED = 1 << 16
"""Largest number of labelled keys of one tenant whose chunks are not inserted yet."""
