"""The settings of a `LocalDiskBackend`, checked."""

from __future__ import annotations

from lmkv.chunks import codec
from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import ConfigError


def check_settings(namespace: bytes, sync: str, direct: str, segment_bytes: int) -> None:
    """Raise ConfigError for a bad one."""
    if len(namespace) != KEY_BYTES:
        raise ConfigError(f"namespace must have {KEY_BYTES} bytes, not {len(namespace)}")
    if sync not in ("none", "data", "full"):
        raise ConfigError(f"sync must be 'none', 'data' or 'full', not {sync!r}")
    if direct not in ("auto", "on", "off"):
        raise ConfigError(f"direct must be 'auto', 'on' or 'off', not {direct!r}")
    if segment_bytes % codec.PAGE or not codec.PAGE <= segment_bytes <= codec.MAX_SEGMENT_BYTES:
        raise ConfigError(f"segment_bytes must be 1 to 4096 pages of 4096 bytes, not {segment_bytes}")
