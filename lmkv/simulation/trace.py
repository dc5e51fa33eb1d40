"""Reads traces of requests in several formats: Mooncake's, RAGPulse's, run-length sessions, and `lmkv record`'s."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from lmkv.errors import UsageError, how_to_install, outside, short_repr
from lmkv.protocols import ChunkKey

_KEY_BYTES: Final = 16
_BLOCK_BYTES: Final = 64
_CHUNK_BYTES: Final = 1024
REQUEST_BLOCKS: Final = 8
"""The memory that a request without blocks takes, in units of a block. `_BLOCK_BYTES`, `_CHUNK_BYTES`: estimated memory
of a block and of a new chunk.
"""


@define(eq=False)
class TraceRequest:
    """One request of a trace.

    `time`: seconds since the start of the trace. `keys`: the keys of the prompt's chunks, first to last; the last chunk
    may be partial. `tokens`: number of tokens of the prompt. `output_tokens`: number of generated tokens. `session`:
    the same text in all requests of a session; empty if the trace has no sessions.
    """

    time: float
    keys: list[ChunkKey]
    tokens: int
    output_tokens: int = 0
    session: str = ""


@define(eq=False, slots=False)
class Trace:
    """The requests of a server, sorted by time. `chunk_tokens`: number of tokens in a full chunk."""

    name: str
    chunk_tokens: int
    requests: list[TraceRequest]

    @cached_property
    def accesses(self) -> int:
        return sum(len(request.keys) for request in self.requests)

    @cached_property
    def unique(self) -> int:
        """Number of different chunks in all requests."""
        return len({key for request in self.requests for key in request.keys})

    @cached_property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


@define(eq=False)
class MemoryLimit:
    """Counts the bytes of memory that a trace takes while it is read, with the limit `nbytes`."""

    nbytes: int
    blocks: int = 0
    chunks: int = 0

    def count(self, blocks: int, chunks: int = 0) -> None:
        """Count the memory of `blocks` blocks of the trace and `chunks` new chunks, before this memory is allocated.

        Raises ValueError if the total exceeds the limit.
        """
        self.blocks += blocks
        self.chunks += chunks
        if self.blocks * _BLOCK_BYTES + self.chunks * _CHUNK_BYTES > self.nbytes:
            raise ValueError(
                f"{self.blocks:,} blocks of {_BLOCK_BYTES} bytes and {self.chunks:,} different chunks of "
                f"{_CHUNK_BYTES:,} bytes need more memory than --memory, {self.nbytes / 2**30:.3g} GiB: raise --memory"
            )


@define(eq=False)
class KeyTable:
    """Creates the keys of chunks. A key depends on its chunk and all chunks before it, as in lmkv.

    Equal keys are the same object, which saves memory. Keys are hashes, because some policies sample chunks by their
    keys.
    """

    name: str
    room: MemoryLimit
    _keys: dict[object, ChunkKey] = field(init=False, factory=dict)

    def key(self, of: object) -> ChunkKey:
        key = self._keys.get(of)
        if key is None:
            self.room.count(0, 1)
            digest = hashlib.blake2b(f"{self.name} {len(self._keys)}".encode(), digest_size=_KEY_BYTES)
            key = self._keys[of] = digest.digest()
        return key

    def chain(self, root: object, parts: Iterable[object]) -> list[ChunkKey]:
        """Return the keys of a prompt's chunks, first to last. `root`: a value on which all keys depend. `parts`: the
        content of each chunk.
        """
        known, keys, parent = self._keys, [], root
        for part in parts:
            parent = known.get((parent, part)) or self.key((parent, part))
            keys.append(parent)
        return keys


def chunked(blocks: Sequence[object], per_chunk: int, *, partial: bool) -> Iterable[object]:
    """Return chunks of `per_chunk` blocks each.

    `partial`: whether to keep a last chunk with fewer blocks, which is otherwise left out.
    """
    if per_chunk == 1:
        return blocks
    end = len(blocks) if partial else len(blocks) // per_chunk * per_chunk
    return (tuple(blocks[at : at + per_chunk]) for at in range(0, end, per_chunk))


_MOONCAKE_BLOCK, _SESSION_BLOCK, _RAG_BLOCK = 512, 64, 64
_MAX_LINE = 16 << 20
_MAX_BLOCKS = 1 << 20
_MAX_NAME = 100
_MAX_TOKENS = 1 << 40
_MAX_TIME = 1e15
"""Largest time in a trace, in its unit. The other limits: characters of a line, blocks of a request, characters of a
name, tokens.
"""
MEMORY = 4 << 30
"""Default limit of a trace's memory in bytes. A trace of 25 million blocks in a million chunks takes 2.6 GiB."""
_RAG_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def read_trace(
    path: Path, chunk_tokens: int | None = None, *, spread: float = 0.0, seed: int = 1, memory: int = MEMORY
) -> Trace:
    """Read a trace from a file, or a RAGPulse trace from its folder. Files may be compressed with zstd.

    `chunk_tokens`: tokens per chunk, or None for the block size of the trace. `spread`: if not 0, sessions of a
    run-length file begin at random times within this number of seconds, instead of the times in the file. `memory`:
    largest number of bytes that the trace may take. Raises UsageError, with the line and the mistake, if a file is not
    a trace or takes more memory.
    """
    if path.is_dir():
        path = next(iter(sorted(path.glob("0_trace.jsonl*"))), path / "0_trace.jsonl")
    with parsed_lines(path) as lines:
        first = next(lines, None)
        reader, block = _reader(first, spread, seed)
        size = chunk_tokens or block(first)
    name = path.name.removesuffix(".zst").removesuffix(".jsonl").removesuffix("_trace")
    name = path.absolute().parent.name if name == "0" else name
    requests: list[TraceRequest] = []
    room = MemoryLimit(memory)
    with parsed_lines(path) as lines:
        for request in reader(name, lines, size, path, room):
            room.count(REQUEST_BLOCKS)
            requests.append(request)
    requests.sort(key=lambda request: request.time)
    return Trace(name, size, requests)


Reader = Callable[[str, Iterator[Any], int, Path, MemoryLimit], Iterator[TraceRequest]]


def _reader(first: Any, spread: float, seed: int) -> tuple[Reader, Callable[[Any], int]]:
    if not isinstance(first, dict):
        raise ValueError("the line is not a JSON object")
    if "lmkv_trace" in first:
        return _recorded, _recorded_block
    if "requests" in first:
        return partial(_sessions, spread=spread, chance=random.Random(seed)), lambda _: _SESSION_BLOCK
    if isinstance(first.get("hash_ids"), dict):
        return _ragpulse, lambda _: _RAG_BLOCK
    return _mooncake, lambda _: _MOONCAKE_BLOCK


def _mooncake(name: str, lines: Iterator[Any], size: int, _: Path, room: MemoryLimit) -> Iterator[TraceRequest]:
    table = KeyTable(name, room)
    per = _blocks_per_chunk(size, _MOONCAKE_BLOCK)
    for line in lines:
        blocks = _names(line["hash_ids"])
        room.count(len(blocks))
        # An id stands for its prefix as well.
        chunks = table.chain(0, chunked(blocks, per, partial=True)) if per > 1 else []
        keys = chunks or [table.key(block) for block in _once(blocks)]
        tokens, output = _count(line["input_length"]), _count(line["output_length"])
        yield TraceRequest(_seconds(line["timestamp"]) / 1000, keys, tokens, output)


def _sessions(
    name: str, lines: Iterator[Any], size: int, _: Path, room: MemoryLimit, *, spread: float, chance: random.Random
) -> Iterator[TraceRequest]:
    per = _blocks_per_chunk(size, _SESSION_BLOCK)
    for line in lines:
        session = _session(line["id"])
        table = KeyTable(f"{name} {session}", room)
        requests = line["requests"]
        start = chance.uniform(0, spread) - _seconds(requests[0][0]) if spread and requests else 0.0
        for time, tokens, output, _kind, runs in requests:
            if (count := sum(_count(count) for _, count in runs)) > _MAX_BLOCKS:
                raise ValueError(f"a request has more than {_MAX_BLOCKS:,} blocks")
            room.count(count)
            blocks = [block for first, count in runs for block in range(_count(first), first + count)]
            keys = table.chain(0, chunked(blocks, per, partial=False))
            yield TraceRequest(start + _seconds(time), keys, _count(tokens), _count(output), session)


def _ragpulse(name: str, lines: Iterator[Any], size: int, path: Path, room: MemoryLimit) -> Iterator[TraceRequest]:
    lengths = _rag_lengths(path, room)
    table = KeyTable(name, room)
    for line in lines:
        parts = [(part, number) for part in _RAG_PARTS for number in _names(line["hash_ids"].get(part, []))]
        total = _count(sum(lengths[number] for _, number in parts))
        if total // size > _MAX_BLOCKS:
            raise ValueError(f"a request has more than {_MAX_BLOCKS:,} chunks")
        room.count(len(parts) + total // size)
        keys = table.chain(0, _cut(parts, lengths, size))
        output, session = _count(line["output_length"]), _session(line["session_id"])
        yield TraceRequest(_seconds(float(line["timestamp"])), keys, total, output, session)


def _rag_lengths(path: Path, room: MemoryLimit) -> dict[Any, int]:
    lengths: dict[Any, int] = {}
    for side in sorted(path.parent.glob("[1-9]_*.jsonl*")):
        with parsed_lines(side) as lines:
            for entry in lines:
                room.count(REQUEST_BLOCKS)
                (number,) = _names([value for name, value in entry.items() if name.endswith("_id")][:1])
                lengths[number] = _count(entry["token_length"])
    return lengths


def _cut(parts: list[tuple[str, Any]], lengths: dict[Any, int], size: int) -> Iterator[object]:
    """Yield the content of each whole chunk of `size` tokens: the token ranges of the prompt's `parts` in the chunk."""
    content: list[tuple[Any, int, int]] = []
    left = size
    for _, number in parts:
        at, length = 0, lengths[number]
        while at < length:
            taken = min(left, length - at)
            content.append((number, at, taken))
            at, left = at + taken, left - taken
            if not left:
                yield tuple(content)
                content, left = [], size


def _recorded_block(header: Any) -> int:
    return _count(header["chunk_tokens"], 1)


def _recorded(name: str, lines: Iterator[Any], size: int, _: Path, room: MemoryLimit) -> Iterator[TraceRequest]:
    per = _blocks_per_chunk(size, _recorded_block(next(lines)))
    table = KeyTable(name, room)
    for line in lines:
        names = _names(line["keys"].split())
        room.count(len(names))
        keys = [table.key(key) for key in _once(names)]
        keys = keys if per == 1 else keys[per - 1 :: per]
        tokens, output = _count(line["tokens"]), _count(line.get("output", 0))
        yield TraceRequest(_seconds(line["t"]), keys, tokens, output, _session(line.get("session", "")))


def _blocks_per_chunk(size: int, block: int) -> int:
    if size % block:
        raise ValueError(f"the chunk size must be a multiple of the trace's block size of {block} tokens, not {size}")
    return size // block


# -- what a line may have ------------------------------------------------------------------------------------


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MAX_TOKENS:
        raise ValueError(f"{short_repr(value)} is not a number of tokens or blocks")
    return value


def _seconds(value: Any) -> float:
    # nan is in no range
    if type(value) not in (int, float) or not -_MAX_TIME <= value <= _MAX_TIME:
        raise ValueError(f"{short_repr(value)} is not a time")
    return float(value)


def _names(values: Any) -> list[Any]:
    if not isinstance(values, list) or len(values) > _MAX_BLOCKS or not all(map(_is_name, values)):
        raise ValueError(f"{short_repr(values)} is not a list of ids")
    return values


def _is_name(value: object) -> bool:
    """Return whether a value may be a name in a trace. Names must be short, because all names stay in memory."""
    if isinstance(value, str):
        return len(value) <= _MAX_NAME
    return type(value) is int and abs(value) < 10**_MAX_NAME


def _once(names: list[Any]) -> list[Any]:
    """Return a request's block names. Raises ValueError if a name occurs twice: a block includes all tokens before
    it.
    """
    if len({*names}) < len(names):
        raise ValueError("a request has a block twice: leave out the second one, or give it another id")
    return names


def _session(value: Any) -> str:
    if not _is_name(value):
        raise ValueError(f"{short_repr(value)} is not the name or number of a session")
    return str(value)


@contextmanager
def parsed_lines(path: Path) -> Iterator[Iterator[Any]]:
    """Yield, for a `with` block, an iterator over the JSON values of a file's non-blank lines. Decompresses `.zst`
    files.

    Raises UsageError with the file and the line, also for errors that the `with` block raises about the latest line.
    """
    at = 0

    def parsed(file: Any) -> Iterator[Any]:
        nonlocal at
        while text := file.readline(_MAX_LINE + 1):
            at += 1
            if len(text) > _MAX_LINE:
                raise ValueError(f"the line has more than {_MAX_LINE:,} characters")
            if text.strip():
                yield json.loads(text)

    try:
        if not path.is_file():
            # A pipe would be waited for, and can be read once only.
            raise ValueError("the path is not a file" if path.exists() else "there is no such file")
        with _opened(path) as file:
            yield parsed(file)
    except (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error) if type(error) is ValueError else repr(error)
        if isinstance(error, json.JSONDecodeError):
            reason = "the line is not JSON; each line must be a JSON object of Mooncake, RAGPulse or lmkv record"
        raise UsageError(f"{path}{f', line {at}' if at else ''}: not a trace: {outside(reason)}") from error
    except RecursionError as error:
        raise UsageError(f"{path}, line {at}: not a trace: the JSON is nested too deeply") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if path.suffix != ".zst":
        with path.open(encoding="utf-8") as file:
            yield file
        return
    zstd = _zstd(path)
    try:
        with zstd.open(path, "rt", encoding="utf-8") as file:
            yield file
    except zstd.ZstdError as error:
        raise ValueError(f"the file cannot be decompressed: {error}") from error


def _zstd(path: Path) -> Any:
    for name in ("compression.zstd", "zstandard"):  # the first is Python 3.14's
        with suppress(ImportError):
            return import_module(name)
    raise UsageError(f"{path} is compressed: {how_to_install('traces')}, or decompress it")
