"""Parsers of settings: each takes a value as users write it, and raises ValueError with the reason.

Values come from YAML, the environment, JSON and Python, so a number or a boolean may be text.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import unquote

from attrs import frozen

from lmkv.chunks.namespace import salt_label
from lmkv.config.lmcache import BOOLEANS, NOTHING
from lmkv.config.remote_url import RemoteURL, Secret, schemes, split_urls
from lmkv.plugins import is_place

Parse = Callable[[object], Any]

_FILE_URL: Final = re.compile(r"(?i:file):(//(localhost)?(?=/))?(?P<path>/(?!/).*)")
_OTHER_URL: Final = re.compile(r"(?i)file:|[a-z][a-z0-9+.-]*://")

_WHOLE_NUMBER: Final = re.compile(r"\s*[-+]?[0-9]+\s*")
"""No underscores, which Python accepts and other readers do not."""


def boolean(value: object) -> bool:
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in BOOLEANS:
        raise ValueError(f"must be one of {'/'.join(BOOLEANS)}")
    return BOOLEANS[word]


def is_nothing(value: object) -> bool:
    """Whether a value of an option that need not be set leaves it unset: none, null, false, no, off, or empty."""
    return value is None or value is False or (isinstance(value, str) and value.lower() in NOTHING)


def integer(minimum: int, maximum: int = 1 << 40) -> Parse:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("must be a whole number")
        if isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value):
            raise ValueError("must be a whole number, in digits alone")
        try:
            found = int(value)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not minimum <= found <= maximum:
            raise ValueError(f"must be {f'at least {minimum}' if found < minimum else f'at most {maximum}'}")
        return found

    return parse


def number(minimum: float, maximum: float = 1e9, *, above: bool = False) -> Parse:
    """A finite number from `minimum` (or `above` it) to `maximum`."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value)[:400]:
            raise ValueError("must be a number")
        try:
            found = float(value)
        except (ValueError, OverflowError):
            raise ValueError("must be a number") from None
        if not math.isfinite(found):
            raise ValueError("must be finite")
        if found > maximum:
            raise ValueError(f"must be at most {maximum:g}")
        if found < minimum or (above and found == minimum):
            raise ValueError(f"must be {'above' if above else 'at least'} {minimum:g}")
        return found

    return parse


def _named(value: object, names: Iterable[str]) -> str | None:
    # YAML reads a bare on or off as a boolean.
    text = ("on" if value else "off") if isinstance(value, bool) else value
    return next((name for name in names if isinstance(text, str) and name.lower() == text.strip().lower()), None)


def one_of(*names: str) -> Parse:
    def parse(value: object) -> str:
        if (found := _named(value, names)) is None:
            raise ValueError(f"must be one of {', '.join(names)}")
        return found

    return parse


def plugin_name(names: Callable[[], Iterable[str]], *, numbered: str = "") -> Parse:
    """One of `names()` at the time of parsing, or `package.module:Class`. `numbered`: it may be followed by `:5`."""

    def parse(value: object) -> str:
        if isinstance(value, str) and (
            is_place(value.strip()) or (numbered and re.fullmatch(rf"{numbered}:[1-9]\d*", value.strip()))
        ):
            return value.strip()
        # The names of installed packages are the last: to find them takes 10 ms.
        if (found := _named(value, names())) is None:
            raise ValueError(f"must be one of {', '.join(names())}, or package.module:Class")
        return found

    return parse


def path(value: object) -> str | None:
    """A plain path from a path or a file URL, or None."""
    if is_nothing(value):
        return None
    if not isinstance(value, str | os.PathLike):
        raise ValueError("must be a path or file:///path")
    text = os.fspath(value)
    if isinstance(text, str) and text != text.strip():
        raise ValueError("must not begin or end with a blank")
    if isinstance(text, str) and (url := _FILE_URL.fullmatch(text)):
        if set("?#") & set(url["path"]):
            raise ValueError("has a ? or # in its URL: write %3F or %23, or give a plain path")
        text = unquote(url["path"])
    elif isinstance(text, bytes) or _OTHER_URL.match(text):
        raise ValueError("must be a path or file:///path")
    path = os.path.normpath(os.path.expanduser(text))
    if "\0" in text or path.strip("/") == "":
        raise ValueError("must be a path or file:///path, and not /")
    # Keep ./none as a folder, so that it is not read as unset later.
    return os.path.join(os.curdir, path) if is_nothing(path) else path


def urls(value: object) -> tuple[RemoteURL, ...]:
    """From one URL, several with blanks or commas between them, or a list of them."""
    texts = () if is_nothing(value) else split_urls(value) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | RemoteURL) for text in texts):
        raise ValueError("must be a URL, or a list of them")
    found = [text if isinstance(text, RemoteURL) else RemoteURL(text) for text in texts if text]
    if any(url.scheme not in schemes() and not is_place(url.scheme) for url in found):
        raise ValueError(f"must begin with package.module:Class, or one of {', '.join(f'{s}://' for s in schemes())}")
    if not all(url.text.isprintable() and " " not in url.text for url in found):
        raise ValueError("must have printable characters alone, and no blanks")
    try:
        for url in found:
            url.check_hosts()
    except ValueError:  # it may quote a part of a password
        raise ValueError("must have a valid host and port; in a password / is %2F, ? is %3F, # is %23") from None
    return tuple(found)


_SHOWN = re.compile(r"[^:]+:.*|salt-[0-9a-f]{16}")
"""Tenants that are no salt. A salt is a secret, and nothing keeps or shows more than its label."""


@frozen
class Share:
    """A tenant's share of a tier, in percent. `tenant`: a tag as `name:value`, or the label of a salt."""

    tenant: str
    percent: float

    def __str__(self) -> str:
        return f"{self.tenant}={self.percent:g}"


def shares(value: object) -> tuple[Share, ...]:
    """From a mapping of names to percents, or `name=percent` with blanks or commas between."""
    if is_nothing(value):
        return ()
    if isinstance(value, list | tuple) and all(isinstance(each, Share) for each in value):
        return tuple(value)
    if isinstance(value, str):
        value = dict(part.rpartition("=")[::2] for part in re.split(r"[\s,]+", value.strip()) if part)
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be name=percent, several with blanks between")
    percent = number(0, 100)
    plain = {name: share.removesuffix("%") if isinstance(share, str) else share for name, share in value.items()}
    found = tuple(
        Share(name if _SHOWN.fullmatch(name) else salt_label(name), percent(share)) for name, share in plain.items()
    )
    if sum(share.percent for share in found) > 100:
        raise ValueError("must be 100 percent together at most")
    return found


def secret(value: object) -> Secret | None:
    if isinstance(value, Secret):
        return value
    if value is None or (isinstance(value, str) and is_nothing(value)):
        return None
    if not isinstance(value, str):
        # YAML has read yes or no as a boolean.
        raise ValueError("must be a text: in YAML, in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    return Secret(value)


def optional_text(value: object) -> str | None:
    return None if is_nothing(value) else text(value)


def text(value: object) -> str:
    if not isinstance(value, str | None):
        raise ValueError("must be a text")
    return value or ""


def readable(value: object) -> object:
    """A parsed value for people to read, without passwords."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return str(value) if isinstance(value, Secret) else value
