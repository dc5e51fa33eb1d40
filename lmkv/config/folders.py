"""`are_nested`: tells whether two tiers would share a folder."""

from __future__ import annotations

import os
from pathlib import Path


def are_nested(one: str, other: str) -> bool:
    """Whether two paths lead to the same folder, or one into the other, also by links and mounts."""
    first, second = map(_identities, (one, other))
    return first[0] in second or second[0] in first


def _identities(path: str) -> list[object]:
    """Identities of a folder and of all above it."""
    real = Path(os.path.realpath(path))
    return [_identity(place) for place in (real, *real.parents)]


def _identity(path: Path) -> object:
    """Device and inode, or the path of a folder that does not exist."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino
