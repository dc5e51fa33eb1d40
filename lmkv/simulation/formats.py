"""Reads traces: Mooncake's, RAGPulse's, run-length sessions, and those that lmkv records."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmkv.errors import UsageError
from lmkv.simulation.trace import KeyTable, Trace, TraceRequest, chunked

_MOONCAKE_BLOCK, _SESSION_BLOCK, _RAG_BLOCK = 512, 64, 64
_RAG_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def read_trace(path: Path, chunk_tokens: int | None = None, *, spread: float = 0.0, seed: int = 1) -> Trace:
    """Read the trace in a file, or RAGPulse's in its folder; both may be compressed with zstd.

    `chunk_tokens`: None for the trace's own block. `spread`: sessions of a run-length file begin at uniformly random
    times within this number of seconds; 0: as the file says. Raises UsageError for a file that is none of these.
    """
    if path.is_dir():
        path = next(iter(sorted(path.glob("0_trace.jsonl*"))), path / "0_trace.jsonl")
    try:
        with open_text(path) as lines:
            first = json.loads(next(lines, "null"))
            reader, block = _reader(first, spread, seed)
        with open_text(path) as lines:
            size = chunk_tokens or block(first)
            name = path.name.removesuffix(".zst").removesuffix(".jsonl").removesuffix("_trace")
            name = path.absolute().parent.name if name == "0" else name
            requests = list(reader(name, map(json.loads, filter(str.strip, lines)), size, path))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path} cannot be read as a trace: {error!r}") from error
    requests.sort(key=lambda request: request.time)
    return Trace(name, size, requests)


Reader = Callable[[str, Iterator[Any], int, Path], Iterator[TraceRequest]]


def _reader(first: Any, spread: float, seed: int) -> tuple[Reader, Callable[[Any], int]]:
    if not isinstance(first, dict):
        raise UsageError("its first line is no JSON object")
    if "lmkv_trace" in first:
        return _recorded, lambda header: int(header["chunk_tokens"])
    if "requests" in first:

        def sessions(name: str, lines: Iterator[Any], size: int, path: Path) -> Iterator[TraceRequest]:
            return _sessions(name, lines, size, spread, random.Random(seed))

        return sessions, lambda _: _SESSION_BLOCK
    if isinstance(first.get("hash_ids"), dict):
        return _ragpulse, lambda _: _RAG_BLOCK
    return _mooncake, lambda _: _MOONCAKE_BLOCK


def _mooncake(name: str, lines: Iterator[Any], size: int, _: Path) -> Iterator[TraceRequest]:
    table = KeyTable(name)
    per = _blocks_per_chunk(size, _MOONCAKE_BLOCK)
    for line in lines:
        blocks = line["hash_ids"]
        # An id stands for all that comes before it, too.
        keys = (
            [table.key(block) for block in blocks] if per == 1 else table.chain(0, chunked(blocks, per, partial=True))
        )
        yield TraceRequest(line["timestamp"] / 1000, keys, line["input_length"], line["output_length"])


def _sessions(
    name: str, lines: Iterator[Any], size: int, spread: float, chance: random.Random
) -> Iterator[TraceRequest]:
    per = _blocks_per_chunk(size, _SESSION_BLOCK)
    for line in lines:
        session = str(line["id"])
        table = KeyTable(f"{name} {session}")
        start = chance.uniform(0, spread) - line["requests"][0][0] if spread and line["requests"] else 0.0
        for time, tokens, output, _, runs in line["requests"]:
            blocks = [block for first, count in runs for block in range(first, first + count)]
            keys = table.chain(0, chunked(blocks, per, partial=False))
            yield TraceRequest(start + time, keys, tokens, output, session)


def _ragpulse(name: str, lines: Iterator[Any], size: int, path: Path) -> Iterator[TraceRequest]:
    lengths = _rag_lengths(path)
    table = KeyTable(name)
    for line in lines:
        parts = [(part, number) for part in _RAG_PARTS for number in line["hash_ids"].get(part, ())]
        total = sum(lengths[number] for _, number in parts)
        keys = table.chain(0, _cut(parts, lengths, size))
        yield TraceRequest(float(line["timestamp"]), keys, total, line["output_length"], line["session_id"])


def _rag_lengths(path: Path) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for side in sorted(path.parent.glob("[1-9]_*.jsonl*")):
        with open_text(side) as lines:
            for entry in map(json.loads, filter(str.strip, lines)):
                number = next(value for name, value in entry.items() if name.endswith("_id"))
                lengths[number] = entry["token_length"]
    return lengths


def _cut(parts: list[tuple[str, int]], lengths: dict[int, int], size: int) -> Iterator[object]:
    """The content of each whole chunk: which tokens of which parts."""
    content: list[tuple[int, int, int]] = []
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


def _recorded(name: str, lines: Iterator[Any], size: int, _: Path) -> Iterator[TraceRequest]:
    header = next(lines)
    per = _blocks_per_chunk(size, header["chunk_tokens"])
    table = KeyTable(name)
    for line in lines:
        keys = [table.key(key) for key in line["keys"].split()]
        keys = keys if per == 1 else keys[per - 1 :: per]
        yield TraceRequest(line["t"], keys, line["tokens"], line.get("output", 0), line.get("session", ""))


def _blocks_per_chunk(size: int, block: int) -> int:
    if size % block:
        raise UsageError(f"a chunk must be a multiple of the trace's blocks of {block} tokens, not {size}")
    return size // block


def open_text(path: Path) -> io.TextIOBase:
    """Lines of a file, decompressed if its name ends with .zst."""
    if path.suffix != ".zst":
        return path.open(encoding="utf-8")
    try:
        from compression import zstd  # Python 3.14

        return zstd.open(path, "rt", encoding="utf-8")  # type: ignore[no-any-return]
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UsageError(f'{path} is compressed: pip install "lmkv[traces]", or decompress it') from None
    return zstandard.open(path, "rt", encoding="utf-8")  # type: ignore[no-any-return]
