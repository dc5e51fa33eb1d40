"""Translates LMCache's addresses of remote stores, together with the related keys of LMCache's `extra_config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from lmkv.config.parsers import NOTHING, boolean

Given = Mapping[str, object]
"""Values of LMCache's `extra_config`, by key."""
Found = dict[str, object]
"""Values of lmkv's settings, by name."""

_AWS: Final = re.compile(
    r"(?P<bucket>[a-z0-9][a-z0-9.-]*)\.s3[.-]((dualstack\.)?(?P<region>[a-z0-9-]+)\.)?amazonaws\.com(\.cn)?",
    re.IGNORECASE,
)
_WHICH: Final = "the address does not name the bucket: write s3://BUCKET?endpoint="
_NO_TTL: Final = 86_400
"""LMCache's default for `valkey_ttl_sec`, in seconds, if `valkey_enable_ttl` is on."""
_STORES: Final = "a store that others share (redis://, s3://, mooncake://), or shared_memory on one machine"


class RefusedError(ValueError):
    """lmkv cannot use an address. The message names a form that lmkv can use, without quoting any value."""


def translated(url: str, extra: Given) -> Found:
    """Return lmkv's settings for `url`, a store's address in LMCache's form. `extra`: LMCache's `extra_config`.

    Raises RefusedError for an address that lmkv cannot use.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in _REFUSED:
        raise RefusedError(_REFUSED[scheme])
    return _FORMS[scheme](url, extra) if scheme in _FORMS else {"remote_url": url}


def keys_of(url: str) -> frozenset[str]:
    """Return the keys of `extra_config` that LMCache reads for a store with this address."""
    return _KEYS.get(url.partition("://")[0].lower(), frozenset())


def setting_of(key: str) -> str:
    """Return the name of lmkv's setting for a key of `extra_config`.

    The result is `remote_url` for a key that becomes part of the address.
    """
    if key.endswith(("username", "aws_access_key_id", "account_url")):
        return "remote_username"
    if key.endswith(("password", "aws_secret_access_key", "account_key")):
        return "remote_password"
    return "remote_ttl" if "ttl" in key else "remote_url"


# -- kinds of stores --------------------------------------------------------------------------------------


def _s3(url: str, extra: Given) -> Found:
    parts = urlsplit(url)
    if _is_on(extra, "s3_enable_s3express"):
        raise RefusedError("directory buckets (s3_enable_s3express) are not supported: name a general purpose bucket")
    region, secure = _text(extra, "s3_region"), not _is_on(extra, "disable_tls")
    place, path = parts.netloc.rpartition("@")[2], parts.path.strip("/")
    options = {}
    if aws := _AWS.fullmatch(place):
        bucket, region = aws["bucket"], region or aws["region"] or ""
        if not secure:
            options["endpoint"] = f"http://s3.{region or 'us-east-1'}.amazonaws.com"
    elif ":" in place or place == "localhost" or re.fullmatch(r"[0-9.]+", place):
        bucket, _, path = path.partition("/")
        if not bucket:
            raise RefusedError(f"{_WHICH}http://HOST:PORT&region=REGION")
        options["endpoint"] = f"{'https' if secure else 'http'}://{place}"
    elif "." in place and not parts.query:
        raise RefusedError(f"{_WHICH}{'https' if secure else 'http'}://HOST&region=REGION")
    elif not secure and "endpoint=https:" in parts.query.lower():
        raise RefusedError(
            "disable_tls contradicts the endpoint: write http:// into the endpoint, or remove disable_tls"
        )
    else:
        bucket = place
    if region and "region=" not in parts.query:
        options["region"] = region
    query = "&".join(filter(None, [parts.query, urlencode(options, safe=":/")]))
    found: Found = {"remote_url": f"s3://{bucket}{f'/{path}' if path else ''}{f'?{query}' if query else ''}"}
    return found | _login(_text(extra, "aws_access_key_id"), _text(extra, "aws_secret_access_key"))


def _valkey(url: str, extra: Given) -> Found:
    scheme = "valkeys" if _is_on(extra, "tls_enable") else "valkey"
    hosts = url.partition("://")[2]
    if _text(extra, "valkey_mode") == "cluster":
        found: Found = {"remote_url": f"{scheme}+cluster://{hosts.rstrip('/')}"}
    elif "," in hosts:
        raise RefusedError(
            "the address names several hosts: write valkey+cluster://HOST:PORT,HOST:PORT for a cluster's nodes"
        )
    else:
        number = _text(extra, "valkey_database")
        found = {"remote_url": f"{scheme}://{hosts.rstrip('/')}/{number}" if number else f"{scheme}://{hosts}"}
    if _is_on(extra, "valkey_enable_ttl"):
        found["remote_ttl"] = extra.get("valkey_ttl_sec", _NO_TTL)
    return found | _login(_text(extra, "valkey_username"), _text(extra, "valkey_password"))


def _resp(url: str, extra: Given) -> Found:
    found: Found = {"remote_url": f"redis://{url.partition('://')[2]}"}
    return found | _login(_text(extra, "username"), _text(extra, "password"))


def _folder(url: str, extra: Given) -> Found:
    place, _, rest = url.partition("://")[2].partition("/")
    path = f"/{rest}"
    if not rest.strip("/") or "," in path or place.endswith("."):
        raise RefusedError("the address does not name one folder: write file:///FOLDER")
    return {"remote_url": f"file://{quote(path)}"}


def _mooncake(url: str, extra: Given) -> Found:
    names = ("local_hostname", "metadata_server", "protocol", "device_name")
    options = {name: value for name in (*names, "local_buffer_size") if (value := _text(extra, name))}
    if size := _text(extra, "global_segment_size"):
        options["segment_size"] = size
    base, _, query = url.partition("?")
    query = re.sub(r"(^|&)device=", r"\1device_name=", query)
    given = {part.partition("=")[0] for part in query.split("&")}
    more = urlencode({name: value for name, value in options.items() if name not in given}, safe=":/")
    joined = "&".join(filter(None, [query, more]))
    return {"remote_url": f"{base}?{joined}" if joined else base}


def _infinistore(url: str, extra: Given) -> Found:
    # Values go over TCP, which needs no device.
    base, _, query = url.partition("?")
    kept = "&".join(part for part in query.split("&") if not part.startswith("device="))
    return {"remote_url": f"{base}?{kept}" if kept else base}


def _azure(url: str, extra: Given) -> Found:
    container = url.partition("://")[2].strip("/")
    if given := sorted({"azure_connection_string", "azure_sas_token"} & extra.keys()):
        raise RefusedError(f"{given[0]} is not supported: use azure_account_url and azure_account_key")
    host = urlsplit(_text(extra, "azure_account_url")).hostname or ""
    return {"remote_url": f"az://{container}"} | _login(host.partition(".")[0], _text(extra, "azure_account_key"))


def _login(username: str, password: str) -> Found:
    given = {"remote_username": username, "remote_password": password}
    return {name: value for name, value in given.items() if value}


def _text(extra: Given, key: str) -> str:
    """Return the value of a key as text, or "" if the key is not set."""
    text = str(extra.get(key) or "").strip()
    return "" if text.lower() in NOTHING - {"off", "no", "false"} else text


def _is_on(extra: Given, key: str) -> bool:
    try:
        return boolean(extra.get(key) or False)
    except ValueError:
        raise RefusedError(f"extra_config.{key} must be true or false") from None


_FORMS: Final[dict[str, Callable[[str, Given], Any]]] = {
    "s3": _s3,
    "valkey": _valkey,
    "resp": _resp,
    "fs": _folder,
    **dict.fromkeys(("mooncake", "mooncakestore"), _mooncake),
    "infinistore": _infinistore,
    "azure": _azure,
}
_KEYS: Final[dict[str, frozenset[str]]] = {
    "s3": frozenset({"s3_region", "s3_enable_s3express", "disable_tls", "aws_access_key_id", "aws_secret_access_key"}),
    "valkey": frozenset(
        {"tls_enable", "valkey_mode", "valkey_database", "valkey_enable_ttl", "valkey_ttl_sec"}
        | {"valkey_username", "valkey_password"}
    ),
    "resp": frozenset({"username", "password"}),
    **dict.fromkeys(
        ("mooncake", "mooncakestore"),
        frozenset(
            {"local_hostname", "metadata_server", "protocol", "device_name", "local_buffer_size", "global_segment_size"}
        ),
    ),
    "azure": frozenset({"azure_account_url", "azure_account_key", "azure_connection_string", "azure_sas_token"}),
}
ALL_KEYS: Final = frozenset().union(*_KEYS.values())

_REFUSED: Final = {
    **dict.fromkeys(("lm", "lmcache"), f"lmkv has no cache server: name {_STORES}"),
    "plugin": "lmkv does not load LMCache's plugins; write a backend for lmkv instead (docs/write-a-backend.md)",
    **dict.fromkeys(("blackhole", "mock", "audit"), f"only LMCache's tests use such a store: name {_STORES}"),
    **dict.fromkeys(
        ("bigtable", "eic", "hf3fs", "hfbucket", "sagemaker-hyperpod", "external"),
        f"lmkv does not support this store: name {_STORES}",
    ),
}
