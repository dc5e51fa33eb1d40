"""Bugs for the kit to find: each breaks lmkv for the engines that are made in it.

python -m kv_connector_torture --around tests.torture.seeded:shifted_chunk --connector @lmkv.json
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lmkv.memory.copier import DONE, ChunkCopy
from lmkv.memory.copiers import CPUCopier

_ONE_IN = 4
"""One call in so many goes wrong."""

_load, _store = CPUCopier.load, CPUCopier.store


@contextlib.contextmanager
def _patched(**methods: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(CPUCopier, name, method)
        yield


class _Dice:
    def __init__(self) -> None:
        self._calls = 0

    def due(self) -> bool:
        self._calls += 1
        return self._calls % _ONE_IN == 0


@contextlib.contextmanager
def pages_of_another_request() -> Iterator[None]:
    """A load takes a chunk from the slot that the load before it took one from."""
    dice, before = _Dice(), deque([0], maxlen=1)

    def load(self: Any, copies: Sequence[ChunkCopy], **more: Any) -> Any:
        if copies and dice.due():
            copies = [copies[0]._replace(slot=before[-1]), *copies[1:]]
        before.extend(copy.slot for copy in copies)
        return _load(self, copies, **more)

    with _patched(load=load):
        yield


@contextlib.contextmanager
def shifted_chunk() -> Iterator[None]:
    """A chunk's pages come to each other's places."""
    dice = _Dice()

    def load(self: Any, copies: Sequence[ChunkCopy], **more: Any) -> Any:
        if copies and dice.due():
            runs = tuple(run._replace(blocks=run.blocks[1:] + run.blocks[:1]) for run in copies[-1].runs)
            copies = [*copies[:-1], copies[-1]._replace(runs=runs)]
        return _load(self, copies, **more)

    with _patched(load=load):
        yield


@contextlib.contextmanager
def stale_slot() -> Iterator[None]:
    """A slot that had another chunk keeps that one's pages."""
    dice, used = _Dice(), set[int]()

    def store(self: Any, copies: Sequence[ChunkCopy]) -> Any:
        kept = [copy for copy in copies if copy.slot not in used or not dice.due()]
        used.update(copy.slot for copy in copies)
        return _store(self, kept)

    with _patched(store=store):
        yield


@contextlib.contextmanager
def one_ranks_part() -> Iterator[None]:
    """The second rank does not load its part. For two ranks."""
    init = CPUCopier.__init__

    def remember(self: Any, memory: Any, layout: Any, slab: Any, rank: int = 0) -> None:
        init(self, memory, layout, slab, rank)
        self.rank = rank

    def load(self: Any, copies: Sequence[ChunkCopy], **more: Any) -> Any:
        return DONE if self.rank else _load(self, copies, **more)

    with _patched(__init__=remember, load=load):
        yield


@contextlib.contextmanager
def state_without_its_kv() -> Iterator[None]:
    """The states of recurrent layers are loaded, and the KV of other layers is not. For models with both."""

    def load(self: Any, copies: Sequence[ChunkCopy], **more: Any) -> Any:
        return _load(self, copies[-1:], **more)

    with _patched(load=load):
        yield


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """The process is killed when it stores something."""

    def store(self: Any, copies: Sequence[ChunkCopy]) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with _patched(store=store):
        yield


@contextlib.contextmanager
def kept_blocks() -> Iterator[None]:
    """The blocks of requests that have ended are kept for ever."""
    from lmkv.vllm.connector import LMKVConnector

    with pytest.MonkeyPatch.context() as patch:
        for name in ("request_finished", "request_finished_all_groups"):
            patch.setattr(LMKVConnector, name, lambda *_: (True, None))
        yield


@contextlib.contextmanager
def kv_of_other_weights() -> Iterator[None]:
    """All weights look alike. For several `--weights`."""
    from lmkv.vllm.loaded import LoadedModel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModel, "__call__", lambda self: "the same")
        yield
