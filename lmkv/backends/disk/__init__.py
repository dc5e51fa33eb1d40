"""Chunks as files on a local or shared disk."""

from __future__ import annotations

from lmkv.backends.disk.backend import LocalDiskBackend

__all__ = ["LocalDiskBackend"]
