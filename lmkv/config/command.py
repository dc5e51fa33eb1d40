"""`Command`: a command that starts an engine with lmkv, translated from another command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import define, field

from lmkv.config import addresses, lmcache

TRANSFER: Final = "--kv-transfer-config"
_SOURCE: Final = "command line"
Env = Mapping[str, str]


@define
class Command(lmcache.Translation):
    """A command that starts an engine with lmkv, translated from another command line.

    `before`: the words before the command's options. `kept`: options that remain unchanged. `role`: the `kv_role` of
    the connector. `ranks`: the number of ranks of the engine.
    """

    before: list[str] = field(factory=lambda: ["vllm", "serve"])
    kept: list[str] = field(factory=list)
    role: str = "kv_both"
    ranks: int | None = None
    options: dict[str, str] = field(factory=dict)
    """vLLM's options by name, each with its last value."""
    start: list[str] = field(factory=list)
    """All words before vLLM's options, as they were given."""
    variables: dict[str, str] = field(factory=dict)
    """lmkv's variables before the program. They stay there."""
    several: dict[str, Any] = field(factory=dict)
    """A MultiConnector with the connectors that remain. The place of lmkv has None."""
    replaces: str = ""
    """The connector that LMKVConnector replaces."""
    merged: bool = False
    """Whether lmkv replaces several connectors."""

    def number(self, *names: str, default: int | None = None) -> int | None:
        """Return the number in the first of vLLM's options `names` that is set, or `default` if none is set.

        Returns None if the option's value is not a whole number.
        """
        given = next((self.options[name] for name in names if name in self.options), None)
        return default if given is None else int(given) if given.isdecimal() else None

    def use(self, given: str, name: str, value: object) -> None:
        self.settings.append((name, value, given))
        self.add(given, _SOURCE, "used", here=name)

    def use_folder(self, given: str, folder: object, capacity: object = None) -> None:
        """Make `folder` the disk tier, with the size `capacity`. Refuses a second disk tier.

        `given`: the option as the user wrote it. `capacity`: the setting `max_local_disk_size`, if given.
        """
        if any(name == "local_disk" for name, _, _ in self.settings):
            self.refuse(
                given, "only one folder can be the disk tier: leave out this one, or write remote_url: file:///FOLDER"
            )
            return
        self.use(given, "local_disk", folder)
        if capacity is not None:
            self.use(given, "max_local_disk_size", capacity)

    def leave(self, given: str, why: str) -> None:
        self.add(given, _SOURCE, "without effect", why=why)

    def refuse(self, given: str, why: str) -> None:
        self.add(given, _SOURCE, "refused", why=why)

    def unknown(self, given: str, why: str) -> None:
        self.add(given, _SOURCE, "unknown", why=why)

    def unused(self, group: str, name: str, value: object = True, given: str = "") -> None:
        """Record that an option cannot be used: it has no effect, is refused, or is unknown.

        `group`: the section of commands.toml that lists the option. `value`: the option's value. `given`: the option as
        the user wrote it, if it differs from `name`.
        """
        known, given = lmcache.commands()[group], given or name
        entry = known.get(name)
        if entry is None:
            self.unknown(given, lmcache.hint(name, known))
        elif entry.is_idle(value, {}):
            self.leave(given, entry.idle_because({}))
        else:
            self.refuse(given, entry.why)

    def leave_variables(self, env: Env, reader: str) -> None:
        """Record that LMCache's variables in `env` have no effect, because `reader`, a program, does not read them."""
        for name in env:
            key = lmcache.key_of(name)
            known = lmcache.table().get(key)
            idle = known is not None and known.kind == "without_effect"
            why = known.why if known is not None and idle else f"{reader} does not read this variable"
            self.add(key, f"{lmcache.VARIABLE}{name}", "without effect", why=why)

    def take(self, translation: lmcache.Translation) -> None:
        """Add the result of a translation of LMCache's settings."""
        self.settings += translation.settings
        self.readings += translation.readings
        self.notes += translation.notes


def use_rest(command: Command, given: str, tier: Mapping[str, Any]) -> None:
    """Translate the key `prefix` of `tier`, a lower tier of LMCache. Record each key that lmkv cannot use.

    `given`: the option that describes the tier, as the user wrote it.
    """
    if tier.get("prefix"):
        command.use(f"{given}: prefix", "remote_prefix", tier["prefix"])
    known = lmcache.commands()["tiers"]
    for key in sorted(tier.keys() - addresses.ALL_KEYS):
        if key not in known or known[key].kind in ("refused", "without_effect"):
            command.unused("tiers", key, tier[key], f"{given}: {key}")


def use_store(command: Command, given: str, described: Callable[[], tuple[str, Mapping[str, Any]]]) -> None:
    """Add a remote store of LMCache to lmkv's setting `remote_url`, or record why lmkv refuses the store.

    `given`: the option that describes the store, as the user wrote it. `described`: a function that returns the store's
    URL and LMCache's `extra_config`.
    """
    try:
        found = addresses.translated(*described())
    except addresses.RefusedError as error:
        command.refuse(given, str(error))
        return
    except KeyError as error:
        command.refuse(given, f"the key {error} is missing")
        return
    before = {name: value for name, value, _ in command.settings if name in (*found, *_LOGIN)}
    if before and len(before | found) > 1:
        command.refuse(
            given, "several stores need logins in remote_url, such as redis://USER:PASSWORD@HOST,s3://BUCKET"
        )
        return
    if before:
        urls = before["remote_url"]
        command.settings = [each for each in command.settings if each[0] != "remote_url"]
        found["remote_url"] = [*(urls if isinstance(urls, list) else [urls]), found["remote_url"]]
    command.settings += [(name, value, given) for name, value in found.items()]
    command.add(given, _SOURCE, "used", here="remote_url")


_LOGIN: Final = ("remote_username", "remote_password", "remote_ttl")
