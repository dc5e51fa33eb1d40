"""`Address`: where an engine's service listens, and where the other engines of its server find it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from attrs import field, frozen

from lmkv.errors import ConfigError, short_repr

UNIX = "unix:"
_LOCALHOST = re.compile(r"(?i)^localhost\.?:")
_NAME_DIGITS = 16
_PATIENCE, _PAUSE = 3.0, 0.02
"""Seconds to wait for another server that binds a socket in a folder, and between two looks."""


def _literal(text: str) -> str:
    """The same with 127.0.0.1 for `localhost`, which may be ::1 as well: there another user may listen."""
    return _LOCALHOST.sub("127.0.0.1:", text)


@frozen
class Address:
    """Where the service listens: a port of loopback, or the path of a unix socket."""

    text: str = field(converter=_literal)

    @property
    def url(self) -> str:
        """The address in the form that clients take."""
        return self.text if self.text.startswith(UNIX) else f"http://{self.text}"

    @property
    def is_known(self) -> bool:
        """Whether it is known before it is bound, and so one server's alone."""
        return not self.text.endswith(":0")

    def of_engine(self, number: int) -> Address:
        """Address of one of a server's engines: the next port for each, or a socket of its own."""
        if not number:
            return self
        host, _, port = self.text.rpartition(":")
        unix = self.text.startswith(UNIX) or not port.isdigit()
        return Address(f"{self.text}.{number}" if unix else f"{host}:{int(port) + number}")

    def private(self, number: int) -> Address:
        """The socket at which the engines of this first one's server reach one of them: nobody else makes its file.

        Raises OSError without a folder that is this user's alone.
        """
        # An address means something in one container alone, and folders may be common to several.
        container = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net")]
        name = hashlib.sha256(f"{container} {self.text}".encode(errors="surrogateescape")).hexdigest()[:_NAME_DIGITS]
        return Address(f"{UNIX}{_private_folder()}/{name}.{number}")

    def bind(self) -> tuple[socket.socket, str]:
        """`(socket, URL)`. Raises ConfigError for other addresses, OSError where it cannot be bound."""
        # An empty path would be an abstract socket, which every user may open.
        if self.text.startswith(f"{UNIX}/") and "\0" not in self.text:
            return _unix_socket(self.text.removeprefix(UNIX)), self.text
        host, _, port = self.text.rpartition(":")
        host = host.strip("[]")
        with suppress(ValueError):
            if ip_address(host).is_loopback and port.isdigit() and int(port) < 1 << 16:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                bound = socket.create_server((host, int(port)), family=family)
                literal = f"[{host}]" if ":" in host else host
                return bound, f"http://{literal}:{bound.getsockname()[1]}"
        raise ConfigError(
            f"agent_listen = {short_repr(self.text)} must be unix:/path, or a loopback address such as 127.0.0.1:8377"
        )


@contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """Hold the folder's lock, so that no other server is between `bind` and `listen`; after a while go on without.

    Anybody who may read the folder may hold it, too.
    """
    with ExitStack() as held:
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_PAUSE)
        yield


def _unix_socket(path: str) -> socket.socket:
    with _one_at_a_time(os.path.dirname(path)):
        return _alone_bound(path)


def _alone_bound(path: str) -> socket.socket:
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        # A server that is too busy to accept connections does not answer either.
        probe.settimeout(1)
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
            # The server of this socket has ended.
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX)
    with ExitStack() as taken:
        taken.callback(bound.close)
        bound.bind(path)
        taken.callback(os.unlink, path)
        # Nobody can connect before `listen`, so the mode is right in time. An umask would change it for all threads.
        os.chmod(path, 0o600)
        # Listen before the thread runs, so that early callers wait instead of being refused, as at a port.
        bound.listen()
        taken.pop_all()
    return bound


# -- a folder of this user's alone ---------------------------------------------------------------------------


def _bases() -> list[str]:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return [*([given] if given else []), tempfile.gettempdir(), "/tmp"]


def _private_folder() -> Path:
    """The first of the user's folders for sockets that nobody else can change, made where it is missing."""
    refused: OSError | None = None
    for base in _bases():
        try:
            folder = Path(os.path.realpath(base, strict=True), f"lmkv-{os.geteuid()}")
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            _check_private(folder)
        except OSError as error:
            refused = refused or error
        else:
            return folder
    raise refused or FileNotFoundError("there is no folder for sockets")


def _check_private(folder: Path) -> None:
    """Raise PermissionError if others may enter the folder, or could replace it on the way to it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EACCES, "is not a folder of mode 0700 of this user: remove it", str(folder))
    # In a user namespace root of outside has another number.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for above in folder.parents:
        status = above.stat()
        can_replace = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted or can_replace:
            raise PermissionError(errno.EACCES, "others may replace what is in it: chmod +t", str(above))
