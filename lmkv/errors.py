"""The exceptions of lmkv.

Exceptions report misuse and broken components. A miss, a rejected write and the failure of one key are return values
(see `lmkv.protocols`), not exceptions.
"""

from __future__ import annotations

import json
import re
import reprlib
from urllib.parse import unquote

_BEFORE_URL = re.compile(r"(?i)(?<=[\s,;'\"=(\[])(?=[a-z][a-z0-9+.-]*://)")
# Also a word with a colon and an @, which may be a URL with a forgotten or misspelt scheme.
_SCHEME = re.compile(
    r"(?i)://|\b(?:rediss?|valkeys?|infinistore|mooncake|mooncakestore|s3):/?|(?<!\S)(?=['\"]?[^\s:]*:(?!//)\S*@)"
)
# Also a name without a value, so that no character is looked at from every ? before it.
_IN_QUERY = re.compile(r"([?&])([^=&#]*)(?:=([^&]*))?")
SECRET = re.compile(r"(?i)passw|pass\b|pwd|pw\b|secret|token|key|credential|signature|proxy|\bsig")
"""Matches the names of options that have secret values."""
_READ, _SHOWN = 8000, 1000
"""Largest number of characters to read, and to show, of a text that does not come from lmkv."""


def mask_secrets(text: str) -> str:
    """Return the text with the passwords of all URLs in it replaced by `***`.

    >>> mask_secrets("redis://cache:secret@host:6379/0?ssl_password=other&db=1")
    'redis://cache:***@host:6379/0?ssl_password=***&db=1'
    """
    return _IN_QUERY.sub(_masked_option, _masked_users(text))


def _masked_users(text: str) -> str:
    return "".join(map(_masked_user, _BEFORE_URL.split(text)))


def _masked_user(text: str) -> str:
    """Mask the password of one URL. The password ends at the last @, because users forget to encode : / ? # @ in
    passwords.
    """
    if not (scheme := _SCHEME.search(text)):
        return text
    user, colon, rest = text[scheme.end() :].partition(":")
    _, at, place = rest.rpartition("@")
    return f"{text[: scheme.end()]}{user}:***@{place}" if colon and at else text


def _masked_option(found: re.Match[str]) -> str:
    start, name, value = found.groups()
    if value is None:
        return found[0]
    if SECRET.search(unquote(name)):
        return f"{start}{name}=***"
    plain = unquote(value)
    hidden = _masked_users(plain)
    return found[0] if hidden == plain else f"{start}{name}={hidden}"


def printable(text: str, most: int = 200) -> str:
    """Return the beginning of a text from outside, with printable characters only, for a log, a page or a terminal.

    >>> printable("a\\x1b[2Jb\\nc", 7)
    'a?[2Jb…'
    """
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return shown if shown.isprintable() else "".join(each if each.isprintable() else "?" for each in shown)


def outside(text: str) -> str:
    """Prepare a text from a store or a client library for a message: shortened, in one line, with passwords masked.

    >>> outside("refused: redis://cache:secret@host " + "more " * 9_000)[:40]
    'refused: redis://cache:***@host more mor'
    """
    # Masked before it is cut, and without its last word if that is cut: half a URL would keep its password.
    read = text if len(text) <= _READ else text[:_READ].rpartition(" ")[0] or text[:_READ]
    line = " ".join("".join(char if char.isprintable() else " " for char in mask_secrets(read)).split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 4]} ..."


def _masked_repr(x: str, level: int) -> str:
    """Return the repr of a string with passwords masked. `level`: the depth of nesting, an argument that `reprlib`
    passes.
    """
    return reprlib.Repr.repr_str(_SHORT, mask_secrets(x), level)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 40
_SHORT.repr_str = _masked_repr  # type: ignore[method-assign]


def short_repr(value: object) -> str:
    """Return a value's repr for a message: at most one line, with the passwords of URLs masked. Never raises.

    >>> print(short_repr("a" * 100), short_repr([[["deep"]]]))
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' [[[...]]]
    """
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError, RuntimeError, TypeError):
        # An int of 5,000 digits has no repr; a user's object may have a broken one.
        return f"a {type(value).__name__}"


def safe_repr(error: BaseException) -> str:
    """Return the repr of an error, shortened and with passwords masked. If `repr` raises, return the name of the
    error's type.

    >>> safe_repr(ValueError("no"))
    "ValueError('no')"
    """
    try:
        return outside(repr(error))
    except Exception:
        return type(error).__name__


def how_to_install(extra: str) -> str:
    """Return the pip command that installs an optional extra of lmkv, from the source from which lmkv itself was
    installed.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("lmkv").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, folder = str(origin.get("url", "")), origin.get("dir_info") is not None
    path = unquote(url.removeprefix("file://")) if url.startswith("file://") else ""
    if path:
        return f"pip install {'-e ' * bool(folder and origin['dir_info'].get('editable'))}'{path}[{extra}]'"
    if vcs := origin.get("vcs_info"):
        return f"pip install 'lmkv[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}'"
    if url:
        return f"pip install 'lmkv[{extra}] @ {url}'"
    return f"install the extra {extra!r} of lmkv as you installed lmkv, for example pip install '.[{extra}]'"


class LmkvError(Exception):
    """Base class of all exceptions that lmkv defines."""


class ConfigError(LmkvError, ValueError):
    """A setting is unknown, has an invalid value, or cannot work on this machine. The message names the setting, its
    value, and where the value was set.
    """


class ClosedError(LmkvError):
    """A program used an object after the object's `close()`."""


class UsageError(LmkvError):
    """An argument is wrong: for example a shape, a lease that was released, or a block that does not exist."""


class BackendError(LmkvError):
    """A backend failed in `action`, such as "read". `key`: the chunk's key in hexadecimal, or "" if the action was not
    for one chunk.

    `reason` is shortened and its passwords are masked, because a server may have written this text.
    """

    def __init__(self, backend: str, action: str, key: str = "", reason: str = "") -> None:
        self.backend = backend
        self.action = action
        self.key = key
        self.reason = outside(reason)
        of = f" of chunk {key}" if key else ""
        super().__init__(f"backend {backend!r}: {action}{of} failed: {self.reason or 'no reason given'}")

    def __reduce__(self) -> tuple[type[BackendError], tuple[str, str, str, str]]:
        return type(self), (self.backend, self.action, self.key, self.reason)


class CorruptChunkError(BackendError):
    """A chunk's bytes differ from the bytes that were stored. lmkv removes such a chunk, and counts a miss."""


class NoSpaceError(BackendError):
    """The medium of a backend is full or read-only. The backend takes no new chunks, but still serves existing
    chunks.
    """


class BackendUnavailable(BackendError):
    """The backend does not answer, or its folder cannot be used. lmkv tries the backend again later."""
