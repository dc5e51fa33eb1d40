"""`Medium` recognizes the disk under a folder. So lmkv never writes into the empty mount point of an unmounted disk."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress

NAME = ".lmkv-medium"
_BYTES = 32
_GROUP = stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class MediumError(OSError):
    """The path of a folder now leads to another medium than before. lmkv must not read or write below this path."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.ENODEV, f"{what}: mount that file system again, or restart the engine", path)


class Medium:
    """The medium (the mounted file system) of the folder at `path`, recognized by its device number and by a small file
    with random digits.

    A folder that is created again on the same device is on the same medium. A folder that is mounted again under
    another device number is on the same medium if the small file has the same digits. Without this file, only the
    device number counts. Thread-safe. The constructor raises `OSError` if there is no folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     medium = Medium(folder)
    ...     medium.check()
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._device = os.stat(path).st_dev
        self._name = self._read() or self._read(os.O_CREAT | os.O_APPEND)

    def check(self, status: os.stat_result | None = None) -> None:
        """Raise `MediumError` if the folder is now on another medium, and `OSError` if the folder does not exist.

        `status`: the result of `os.stat` for the folder, if the caller has this result.
        """
        device = (status or self._status()).st_dev
        if device == self._device:
            return
        if not self._name or self._read() != self._name:
            raise MediumError(self.path, "the folder is no longer on the file system that lmkv began with")
        self._device = device

    def _status(self) -> os.stat_result:
        try:
            # Open it, because a stat does not trigger an automount.
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._device_above() != self._device:
                raise MediumError(self.path, "the file system of the folder is no longer mounted") from None
            raise
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _device_above(self) -> int:
        """Return the device number of the nearest existing folder at or above the path."""
        above = self.path
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        return os.stat(above).st_dev

    def _read(self, more: int = 0) -> bytes:
        """Return the content of the small file, or b"" if the file does not exist or has another length. `more`:
        further flags for `open`, such as `os.O_CREAT`.
        """
        with suppress(OSError):
            fd = os.open(os.path.join(self.path, NAME), os.O_RDWR * bool(more) | more | _CAREFULLY, 0o600)
            try:
                status, above = os.fstat(fd), os.stat(self.path).st_mode
                # A file with several names may be somebody else's.
                if more and not status.st_size and status.st_nlink == 1:
                    if above & _GROUP == _GROUP & ~stat.S_IWOTH:
                        os.fchmod(fd, 0o660)
                    os.write(fd, secrets.token_hex(_BYTES // 2).encode())
                # The first of several processes that write at once: each appends.
                mark = os.pread(fd, _BYTES, 0)
                return mark if len(mark) == _BYTES else b""
            finally:
                os.close(fd)
        return b""
