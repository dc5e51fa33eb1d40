"""Computes chunk keys from tokens, with the standard library alone.

The key of chunk i is the SHA-256 digest of these bytes: the root, and then tokens[0 : (i + 1) * chunk_size] as
little-endian uint32. So a key depends on the tokens of its chunk and on all earlier tokens. The hash is incremental, so
n tokens take O(n) time. Inputs other than tokens, such as images, change later keys (see `KeyChain`).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import index
from typing import Any, Final, Literal, Protocol, Self

from lmkv.errors import UsageError, short_repr

KEY_BYTES: Final = 32
"""Bytes of chunk keys, namespace digests and roots, which are SHA-256 digests."""

_TOKEN_BYTES: Final = 4
_UINT32: Final[Literal["I", "L"]] = "I" if array("I").itemsize == _TOKEN_BYTES else "L"
_REROOT_TAG: Final = b"lmkv extras\0"
_STATE_TAG: Final = b"lmkv state\0"


class Tokens(Protocol):
    """A sequence of token ids: a list, tuple, array, numpy array or torch tensor, or a sequence that returns slices of
    these types.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Any: ...


class TailKey(bytes):
    """The key of a tail: the tokens after a prompt's last whole chunk. `tokens`: the number of these tokens."""

    tokens: int

    @classmethod
    def of(cls, digest: bytes, tokens: int) -> Self:
        key = cls(digest)
        key.tokens = tokens
        return key


class StateKey(bytes):
    """The key of a state entry: states of recurrent layers at the end of a chunk.

    `number`: the number of the state entry, from 1 on, because a chunk may have several; see `LayerPages.state`.
    """

    number: int

    @classmethod
    def of(cls, chunk: bytes, number: int) -> Self:
        """Return the key of a chunk's state entry (recurrent layers' states) `number`. `chunk`: the chunk's key."""
        key = cls(hashlib.sha256(_STATE_TAG + chunk + number.to_bytes(2, "little")).digest())
        key.number = number
        return key


@lru_cache(1 << 16)
def state_keys(chunk: bytes, count: int) -> tuple[StateKey, ...]:
    """Return the keys of the `count` state entries (recurrent layers' states) of a chunk. `chunk`: the chunk's key."""
    return tuple(StateKey.of(chunk, number) for number in range(1, count + 1))


class KeyChain:
    """The keys of one growing token sequence: `keys[i]`, 32 bytes, is the key of chunk i.

    `root`: 32 bytes, see `Namespace.root`. `chunk_size`: tokens per chunk. `extras`: for some chunk indices, a 32-byte
    digest of the chunk's inputs other than tokens, such as an image. The key of such a chunk, and all later keys,
    depend on this digest. Not thread-safe.
    """

    __slots__ = ("_chunk_size", "_extras", "_ids", "_stream", "keys", "root")

    def __init__(self, root: bytes, chunk_size: int, extras: Mapping[int, bytes] | None = None) -> None:
        if chunk_size < 1:
            raise UsageError(f"chunk_size must be positive, not {short_repr(chunk_size)}")
        self.root = _checked_digest(root, "root")
        self.keys: list[bytes] = []
        self._chunk_size = chunk_size
        self._extras = _checked_extras(extras) if extras else {}
        self._stream = hashlib.sha256(root)
        self._ids = bytearray()

    def extend(self, tokens: Tokens) -> None:
        """Add the keys of the chunks that are now complete. `tokens`: ALL tokens of the sequence so far.

        Ignores the tokens after the last whole chunk. Raises UsageError with the position of a token that is not a
        uint32; the chain is then unchanged.
        """
        done = len(self.keys)
        complete = _length(tokens) // self._chunk_size
        if complete > done:
            ids = _uint32(tokens, done * self._chunk_size, complete * self._chunk_size)
            self._absorb(memoryview(ids), complete - done)

    def parent(self, position: int) -> bytes:
        """Return the key of the chunk before chunk `position`, or b"" for position 0. `position` may be `len(keys)`,
        the index of the next chunk.
        """
        if not 0 <= position <= len(self.keys):
            raise UsageError(f"there is no chunk {position} in a chain of {len(self.keys)} chunks")
        return self.keys[position - 1] if position else b""

    def origin(self, position: int) -> bytes:
        """Return a digest of everything before the tokens of chunk `position`: the previous chunk's key (for position
        0, the root), hashed with the chunk's `extras` if there are any.

        Two chunks with equal origins and equal tokens have the same KV.
        """
        before = self.parent(position) or self.root
        extra = self._extras.get(position)
        return before if extra is None else _with_extra(before, extra)

    def tail(self, tokens: Tokens) -> TailKey | None:
        """Return the key of the tokens after the last whole chunk, or None if there are no such tokens. `tokens`: all
        tokens that were passed to `extend`.
        """
        done, count = len(self.keys) * self._chunk_size, _length(tokens)
        if count == done:
            return None
        extra = self._extras.get(len(self.keys))
        stream = self._stream.copy() if extra is None else self._rerooted(extra)
        stream.update(memoryview(_uint32(tokens, done, count))[: count - done])
        return TailKey.of(stream.digest(), count - done)

    def token_bytes(self, first: int, end: int) -> bytes:
        """Return the token ids of chunks `first` to `end - 1` as little-endian uint32."""
        width = self._chunk_size * _TOKEN_BYTES
        return bytes(memoryview(self._ids)[first * width : end * width])

    def _absorb(self, ids: memoryview, chunks: int) -> None:
        """Hash the tokens of the next `chunks` chunks. `ids`: the token ids from the first of these chunks on; later
        ids are ignored.
        """
        self._ids += ids[: chunks * self._chunk_size]
        step, extras = self._chunk_size, self._extras
        stream, append = self._stream, self.keys.append
        for start in range(0, chunks * step, step):
            if extras and (extra := extras.get(len(self.keys))) is not None:
                self._stream = stream = self._rerooted(extra)
            stream.update(ids[start : start + step])
            append(stream.digest())

    def _rerooted(self, extra: bytes) -> hashlib._Hash:
        return hashlib.sha256(_with_extra(self.keys[-1] if self.keys else self.root, extra))


def _with_extra(before: bytes, extra: bytes) -> bytes:
    return hashlib.sha256(_REROOT_TAG + before + extra).digest()


def chunk_keys(tokens: Tokens, root: bytes, chunk_size: int, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
    """Return the keys of the `len(tokens) // chunk_size` whole chunks of a prompt, 32 bytes each.

    `root`: see `Namespace.root`. `extras`: see `KeyChain`. Raises UsageError for a token that is not a uint32.

    >>> [key.hex()[:8] for key in chunk_keys(range(10), root=bytes(32), chunk_size=4)]
    ['b02e0d14', '55d1a261']
    """
    return hash_prompt(tokens, root, chunk_size, extras, tail=False)[0].keys


def hash_prompt(
    tokens: Tokens, root: bytes, chunk_size: int, extras: Mapping[int, bytes] | None = None, *, tail: bool
) -> tuple[KeyChain, TailKey | None]:
    """Return a `KeyChain` with the keys of a prompt's whole chunks, and the key of the tokens after these chunks.

    The second key is None if `tail` is false or there are no such tokens. `extras`: see `KeyChain`.
    """
    chain = KeyChain(root, chunk_size, extras)
    chain.extend(tokens)
    return chain, chain.tail(tokens) if tail else None


def token_bytes(tokens: Tokens) -> bytes:
    """Return the bytes of all tokens as little-endian uint32. Raises UsageError with the position of a token that is
    not a uint32.
    """
    return _uint32(tokens, 0, _length(tokens)).tobytes()


def _checked_digest(digest: object, name: str) -> bytes:
    if not isinstance(digest, bytes) or len(digest) != KEY_BYTES:
        raise UsageError(f"{name} must be {KEY_BYTES} bytes, not {short_repr(digest)}")
    return digest


def _checked_extras(extras: Mapping[int, bytes]) -> dict[int, bytes]:
    if misplaced := [at for at in extras if at < 0]:
        raise UsageError(f"extras must not have negative chunk numbers: {misplaced}")
    return {at: _checked_digest(extra, f"extras[{at}]") for at, extra in extras.items()}


def _length(tokens: Tokens) -> int:
    sequence = hasattr(tokens, "__getitem__") and hasattr(tokens, "__len__") and not isinstance(tokens, type)
    if isinstance(tokens, (str, bytes, bytearray, Mapping)) or not sequence:
        raise UsageError(f"tokens must be a sequence of ints, not {type(tokens).__name__}")
    if getattr(tokens, "ndim", 1) != 1:
        raise UsageError(f"tokens must have one dimension, not the shape {getattr(tokens, 'shape', None)}")
    return len(tokens)


def _uint32(tokens: Tokens, start: int, stop: int) -> array[int]:
    """Return tokens[start:stop] as uint32 that are little-endian in memory. The result may contain later tokens as
    well.
    """
    ids = _native_uint32(tokens, start, stop)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _native_uint32(tokens: Tokens, start: int, stop: int) -> array[int]:
    if hasattr(tokens, "dtype"):
        try:
            return _from_ndarray(tokens[start:stop], start)
        except RuntimeError as error:  # of torch: a sparse tensor, or one without memory
            raise UsageError(f"tokens must be a dense tensor with memory: {short_repr(str(error))}") from None
    if start == 0 and isinstance(tokens, (list, tuple)):
        # Slicing a long list would cost a tenth of hashing it. A bad token past `stop` must not matter.
        try:
            return array(_UINT32, tokens)
        except (OverflowError, TypeError):
            pass
    try:
        return _from_sequence(tokens[start:stop], start)
    except TypeError:
        raise UsageError(f"tokens must be a sequence that can be sliced, not a {type(tokens).__name__}") from None


def _from_sequence(tokens: Iterable[int], start: int) -> array[int]:
    try:
        return array(_UINT32, tokens)
    except (OverflowError, TypeError):
        raise _bad_token(tokens, start) from None


def _from_ndarray(tokens: Any, start: int) -> array[int]:
    """Return the tokens of a numpy array, or of a torch tensor on any device, as uint32. This function imports neither
    library.
    """
    if hasattr(tokens, "detach"):
        tokens = _from_tensor(tokens)
    kind, itemsize = tokens.dtype.kind, tokens.dtype.itemsize
    if kind not in "iu":
        raise UsageError(f"tokens must be integers, not {tokens.dtype}")
    fits = kind == "u" and itemsize <= _TOKEN_BYTES
    if not fits and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
        raise _bad_token(tokens.tolist(), start)
    return array(_UINT32, tokens.astype("=u4").tobytes())


def _from_tensor(tokens: Any) -> Any:
    try:
        return tokens.detach().cpu().numpy()
    except TypeError:  # numpy has no bfloat16
        raise UsageError(f"tokens must be integers, not {tokens.dtype}") from None


def _bad_token(tokens: Iterable[object], start: int) -> UsageError:
    for position, token in enumerate(tokens, start):
        try:
            if 0 <= index(token) < 1 << 32:  # type: ignore[arg-type]
                continue
        except TypeError:
            pass
        return UsageError(f"token {short_repr(token)} at position {position} is not an unsigned 32-bit integer")
    return UsageError("tokens cannot be read as integers")
