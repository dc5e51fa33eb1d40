"""KV events in vLLM's words: its hashes of a request's blocks, and its classes of events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define

from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.scheduler.events import Blocks, BlocksRemoved, BlocksStored, Event


def are_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


@define
class BlockDescriber:
    """Describes a request's blocks by vLLM's hashes, and makes vLLM's events of their places.

    `block_sizes`, `kinds`, `groups`: each cached block table's tokens per block, vLLM's name for its attention, and its
    number among vLLM's KV cache groups. `block_pool`: vLLM's, as soon as there is one.
    """

    block_sizes: Sequence[int]
    kinds: Sequence[str]
    groups: Sequence[int]
    block_pool: Any = None

    @classmethod
    def of(cls, kv_cache_config: Any, block_map: BlockMap) -> BlockDescriber:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        numbers = [group.table or 0 for group in block_map.groups]
        specs = [kv_cache_config.kv_cache_groups[number].kv_cache_spec for number in numbers]
        kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        return cls([group.block_size for group in block_map.groups], kinds, numbers)

    @property
    def all_cleared(self) -> bool:
        """Whether vLLM is about to publish that all blocks are gone."""
        from vllm.distributed.kv_events import AllBlocksCleared

        return any(isinstance(event, AllBlocksCleared) for event in self.block_pool.kv_event_queue)

    def __call__(self, request: Any, group: int, start: int, end: int) -> Blocks | None:
        """The blocks of tokens [start, end), None while vLLM has not hashed them."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

        size, lora = self.block_sizes[group], request.lora_request
        # vLLM may hash smaller blocks than a group has.
        hashes = resolve_block_hashes(request.block_hashes, self.block_pool.hash_block_size, size)
        if len(hashes) * size < end:
            return None
        return Blocks(
            group=self.groups[group],
            block_size=size,
            hashes=tuple(map(maybe_convert_block_hash, hashes[start // size : end // size])),
            parent=maybe_convert_block_hash(hashes[start // size - 1]) if start else None,
            tokens=array("I", request.all_token_ids[start:end]),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, size, start, end),
        )

    def as_vllm_events(self, events: Iterable[Event]) -> list[Any]:
        """The same events as vLLM's `BlockStored` and `BlockRemoved`."""
        return [self._stored(event) if isinstance(event, BlocksStored) else _removed(event) for event in events]

    def _stored(self, event: BlocksStored) -> Any:
        from vllm.distributed.kv_events import BlockStored

        blocks = event.blocks
        return BlockStored(
            block_hashes=list(blocks.hashes),
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.tokens),
            block_size=blocks.block_size,
            lora_id=blocks.lora_id,
            lora_name=blocks.lora_name,
            extra_keys=list(blocks.extra_keys) or None,
            group_idx=blocks.group,
            kv_cache_spec_kind=self.kinds[self.groups.index(blocks.group)],
            **event.place._asdict(),
        )


def _removed(event: BlocksRemoved) -> Any:
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=list(event.hashes), group_idx=event.group, **event.place._asdict())


def _extra_keys(request: Any, size: int, start: int, end: int) -> tuple[tuple[Any, ...] | None, ...]:
    """The extra keys, such as images, that vLLM has hashed with each block, or ()."""
    from vllm.v1.core import kv_cache_utils

    keys, image = [], 0
    for at in range(start, end, size):
        found, image = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + size, image)
        keys.append(found)
    # Newer versions hash each value with its kind, and publish it without.
    published = getattr(kv_cache_utils, "to_event_extra_keys", lambda tagged: tagged)
    return tuple(published(keys)) if any(keys) else ()
