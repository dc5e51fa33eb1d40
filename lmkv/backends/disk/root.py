"""The root folder of the disk tier: checks who may have created it, and opens the folders below it.

In a world-writable folder such as /dev/shm, another user may create the root folder first. So an entry of a
world-writable folder must belong to this process's user or to the superuser. The owner of any other folder has chosen
who may write there, so all its entries are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from functools import cache
from typing import Self

from attrs import define, field

from lmkv.backends.disk.fileio import Folder, closed_in_children, temporary
from lmkv.medium import Medium

logger = logging.getLogger(__name__)

_MAX_LINKS = 40
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotTrustedError(PermissionError):
    """Another user may have created a folder or file, or may write to a folder."""


@define
class Root:
    """The root folder of a disk tier, which need not exist yet. Thread-safe, without locks.

    `trusted`: the ids of trusted users. `medium`: the medium on which the folder must stay, or None for any medium.
    """

    path: str
    trusted: set[int] = field(factory=lambda: {0, os.geteuid()})
    medium: Medium | None = field(default=None, init=False, repr=False)
    _keeps_modes: bool = field(default=True, init=False)
    _found: os.stat_result | None = field(default=None, init=False, repr=False)
    _real: str = field(init=False, repr=False)

    @_real.default
    def _real_path(self) -> str:
        return os.path.realpath(self.path)

    @classmethod
    def checked(cls, path: str | os.PathLike[str]) -> Self:
        """Return the existing root folder, after a check that only trusted users could have changed its path.

        Raises `NotTrustedError`, whose message says what to do, and `OSError`.
        """
        root = cls(os.path.abspath(os.fspath(path)))
        root._walk()
        with root.entered():
            return root

    @classmethod
    def made(cls, path: str | os.PathLike[str]) -> Self:
        """Create the folder `path` and missing parent folders, then return the root as `checked` does.

        From then on, `entered` raises `MediumError` if the folder is on another medium.
        """
        # Check before anything is created: a link of another user may lead anywhere.
        with contextlib.suppress(FileNotFoundError):
            cls(os.path.abspath(os.fspath(path)))._walk()
        _make_folders(os.path.abspath(path))
        root = cls.checked(path)
        root.medium = Medium(root.path)
        return root

    def _walk(self) -> os.stat_result:
        """Check each folder and link on the path to the root folder. Returns the status of the root folder.

        The owner of a folder or link becomes trusted if no other user could have created it.
        """
        at, above, links = "/", os.stat("/"), 0
        self.trusted.add(above.st_uid)
        names = self.path.split("/")[::-1]
        while names:
            name = names.pop()
            here = os.path.normpath(os.path.join(at, name))
            status = os.lstat(here)
            if name not in ("", ".", ".."):
                self._check_owner(here, status, above)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)
                target = os.readlink(here)
                names += target.split("/")[::-1]
                if target.startswith("/"):
                    at, above = "/", os.stat("/")
                continue
            at, above = here, status
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                warn_once("lmkv: every user may delete or rename files in folder %s: run chmod +t on the folder", here)
        return above

    def check_owner(self, name: str, status: os.stat_result, folder: Folder) -> None:
        """Raise `NotTrustedError` if an untrusted user may have put the file `name` into an open folder.

        Also raises `NotTrustedError` for a file with several hard links, which may be another user's file.
        """
        path = f"{folder.path}/{name}"
        self._check_owner(path, status, folder.status)
        if status.st_nlink > 1:
            raise NotTrustedError(f"lmkv does not use {path}, because the file has several hard links: remove the file")

    def _check_owner(self, path: str, status: os.stat_result, above: os.stat_result) -> None:
        if status.st_uid in self.trusted:
            return
        if above.st_mode & stat.S_IWOTH and not self._is_mine(path, status):
            reason = f"{path} belongs to user {status.st_uid}, and every user may write to {os.path.dirname(path)}"
            todo = f"run chown {os.geteuid()} {path}, or name another folder"
            raise NotTrustedError(f"{reason}: {todo}")
        self.trusted.add(status.st_uid)

    def _is_mine(self, path: str, status: os.stat_result) -> bool:
        """Return whether a folder belongs to this user, although a server shows another owner (NFS root squash)."""
        with contextlib.suppress(OSError):
            fd = os.open(path, _FOLDER | os.O_NOFOLLOW)
            try:
                return self._as_shown(Folder(fd, path, status)).st_uid == status.st_uid
            finally:
                os.close(fd)
        return False

    @staticmethod
    def _as_shown(folder: Folder) -> os.stat_result:
        """Return the status that the file system shows for a new private file of this user. The owner and mode may
        differ.
        """
        with temporary(folder, 0) as (fd, _):
            return os.fstat(fd)

    @contextlib.contextmanager
    def entered(self, *names: str) -> Iterator[Folder]:
        """Open the root folder, or its subfolder `names`, for a `with` block. Links below the root are not followed.

        If another folder has replaced the root, the new folder and its path are checked again. Raises `NotTrustedError`
        if other users may have created the folder or may write to it. Raises `MediumError` if the folder is on another
        medium than before, and `OSError` if the folder cannot be opened.
        """
        paths = [self._real]
        for name in names:
            paths.append(f"{paths[-1]}/{name}")
        with closed_in_children(*paths):
            fd = self._opened()
            try:
                folder = Folder(fd, self.path, os.fstat(fd))
                if self._found is None or not os.path.samestat(folder.status, self._found):
                    self._check_way(folder.status)
                if folder.status.st_uid not in self.trusted:
                    raise NotTrustedError(f"{self.path} now belongs to user {folder.status.st_uid}: chown it back")
                for name in names:
                    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                    os.close(fd)
                    fd = inner
                    folder = self._checked(Folder(fd, f"{folder.path}/{name}", os.fstat(fd)), folder.status)
                yield folder
            finally:
                os.close(fd)

    def _opened(self) -> int:
        try:
            return os.open(self.path, _FOLDER)
        except FileNotFoundError:
            if self.medium:
                self.medium.check()
            raise

    def _check_way(self, opened: os.stat_result) -> None:
        if self.medium:
            self.medium.check(opened)
        if not os.path.samestat(found := self._walk(), opened):
            raise NotTrustedError(f"folder {self.path} was replaced while lmkv opened the folder")
        self._real, self._found = self._real_path(), found

    def _checked(self, folder: Folder, above: os.stat_result) -> Folder:
        self._check_owner(folder.path, folder.status, above)
        if folder.status.st_mode & stat.S_IWOTH and self._keeps_modes:
            self._keeps_modes = not self._as_shown(folder).st_mode & stat.S_IWOTH
            if self._keeps_modes:
                raise NotTrustedError(f"every user may write to {folder.path}: run chmod o-w {folder.path}")
        return folder

    def make(self, *names: str) -> None:
        """Create the subfolder `names` of the root, and missing folders between. Raises `OSError` if there is no
        root.
        """
        for depth, name in enumerate(names):
            with self.entered(*names[:depth]) as folder:
                folder.make(name)


def _make_folders(path: str) -> None:
    """Create a folder for this user alone, and missing parent folders to which only this user may write."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    while missing:
        with contextlib.suppress(FileExistsError):  # another process has made it
            os.mkdir(missing.pop(), 0o755 if missing else 0o700)


@cache
def warn_once(message: str, *about: str | None) -> None:
    """Log a warning, unless the same warning was logged before. `about`: the values for `message`."""
    logger.warning(message, *about)
