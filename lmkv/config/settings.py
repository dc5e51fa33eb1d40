"""`Config`: the settings of an engine, and `SettingsResult`: the result of reading all given settings.

Only the builder of engines, the vLLM connector and the command line read a `Config`, and make objects from its values.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

from attrs import Attribute, evolve, field, frozen

from lmkv.config import checks, command_lines, containers, lmcache
from lmkv.config.advice import PLACEHOLDER, hint, is_path, unfit_key
from lmkv.config.command import Command
from lmkv.config.options import OPTIONS, Options, parse
from lmkv.config.parsers import Reading, in_words, readable, secret
from lmkv.config.sources import ENV_FILE, flat, given_settings, read_named, read_yaml, typed
from lmkv.errors import SECRET, ConfigError, short_repr


@frozen(kw_only=True)
class Config(Options):
    """The settings of one engine; docs/configuration.md lists them.

    Raises
    ------
    ConfigError
        A value is invalid, or `load` finds an unknown key. The message names the key, value and source of each error.

    Notes
    -----
    Immutable. `load` merges a file, the environment and vLLM's `kv_connector_extra_config`; the constructor uses only
    its keyword arguments.

    Examples
    --------
    >>> config = Config(chunk_size=128, max_local_cpu_size="2.5")
    >>> config.max_local_cpu_bytes == 2.5 * 2**30
    True
    >>> Config.load(env={"LMKV_CHUNK_SIZE": "64"}).source("chunk_size")
    'environment LMKV_CHUNK_SIZE'
    """

    remarks: tuple[tuple[int, str], ...] = field(default=(), eq=False, repr=False)
    """Log lines about the sources, each with its level. `load` fills this tuple."""

    def __attrs_post_init__(self) -> None:
        refused = {name: value for name in OPTIONS if isinstance(value := getattr(self, name), ConfigError)}
        for name in refused:
            object.__setattr__(self, name, OPTIONS[name].default)
        # A refused setting has consequences, which are not separate problems.
        together = (line for line in checks.contradictions(self) if not any(name in line for name in refused))
        if problems := [*map(str, refused.values()), *together]:
            raise ConfigError("\n".join(problems))

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        extra: Mapping[str, object] | None = None,
        ranks: int | None = None,
        **overrides: object,
    ) -> Config:
        """Return the configuration from keywords, a file, the environment and vLLM's extra configuration.

        A later source in this list overrides an earlier source, so keywords are only defaults. `file`: a YAML file; by
        default the file that LMKV_CONFIG_FILE names. `env`: variables such as LMKV_CHUNK_SIZE. `extra`: vLLM's
        `kv_connector_extra_config`, with keys such as `chunk_size` or `lmkv.chunk_size`. `overrides`: settings as
        keywords. Raises ConfigError for an unknown key or an invalid value in any source, even if another source
        overrides the key.

        If no source has a setting of lmkv, LMCache's settings are read: LMCACHE_CONFIG_FILE, LMCACHE_CHUNK_SIZE,
        `lmcache.chunk_size`. `ranks`: the number of ranks of the engine, by which LMCache's sizes are multiplied.
        """
        return SettingsResult.to(file=file, env=env, extra=extra, overrides=overrides, ranks=ranks).checked()

    @property
    def password(self) -> str | None:
        """Password for remote stores, from the setting or from the password file.

        Raises ConfigError if the file is unreadable.
        """
        return self._secret("remote_password")

    @property
    def renew_password(self) -> Callable[[], str | None] | None:
        """A function that reads `password` again, or None if the password is not in a file. A pipe is read only
        once.
        """
        path = self.remote_password_file
        return partial(self._secret, "remote_password") if path and os.path.isfile(path) else None

    @property
    def token(self) -> str | None:
        """Token of the agent API, from the setting or from the token file.

        Raises ConfigError if the file is unreadable or the token cannot be sent in an HTTP header.
        """
        token = self._secret("agent_token")
        if token is not None and not re.fullmatch("[!-~]+", token):
            self._refuse("agent_token_file" if self.agent_token_file else "agent_token", "must be ASCII without blanks")
        if token is not None and not self.agent_token_file and is_path(token.encode()):
            self._refuse("agent_token", "is a path: name the file of the token in agent_token_file")
        if token is not None and PLACEHOLDER.search(token.encode()):
            name = "agent_token_file" if self.agent_token_file else "agent_token"
            self._refuse(name, "has a placeholder instead of a token: make one with openssl rand -hex 32")
        return token

    @property
    def authentication_bytes(self) -> bytes | None:
        """Secret key that authenticates chunks, from the setting or the key file. Raises ConfigError for an invalid
        key.
        """
        if self.authentication_key_file is None:
            return self.authentication_key.value.encode() if self.authentication_key else None
        key = self._content("authentication_key_file").removesuffix(b"\n").removesuffix(b"\r")
        if unfit := unfit_key(key):
            self._refuse("authentication_key_file", unfit)
        return key

    def _secret(self, name: str) -> str | None:
        if getattr(self, f"{name}_file") is None:
            given = getattr(self, name)
            return given.value if given else None
        try:
            lines = self._content(f"{name}_file").decode().splitlines()
        except UnicodeError:
            self._refuse(f"{name}_file", "is not a text file: write the secret into the first line of a text file")
        # An empty token would protect nothing.
        return lines[0] if lines and lines[0] else self._refuse(f"{name}_file", f"has no {name} in its first line")

    def _content(self, name: str) -> bytes:
        try:
            return read_named(getattr(self, name))
        except OSError as error:
            why = error.strerror.lower() if error.strerror else error
            self._refuse(name, f"cannot be read: {why}; name a file that the server's user may read")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise ConfigError(self.about(name, reason))


@frozen
class SettingsResult:
    """The result of reading all settings. The server and all commands use this class, so that they report the same
    problems.

    `config`: the configuration; None if a setting is refused. `readings`: what each setting means in lmkv. `notes`:
    `(log level, remark)` pairs about several settings together. `problems`: error texts about refused settings.
    """

    config: Config | None
    readings: tuple[Reading, ...]
    notes: tuple[tuple[int, str], ...] = ()
    of_lmcache: bool = False
    """Whether the given settings are LMCache's."""
    problems: tuple[str, ...] = ()
    values: Mapping[str, object] = field(factory=dict)
    """The values of the used settings, by name."""

    @classmethod
    def to(
        cls,
        *,
        file: str | os.PathLike[str] | None = None,
        env: Mapping[str, str],
        extra: Mapping[str, object] | None = None,
        overrides: Mapping[str, object] = MappingProxyType({}),
        read: Callable[[Path], Mapping[Any, object]] = read_yaml,
        ranks: int | None = None,
    ) -> Self:
        """Read all settings and return the result. The arguments are those of `Config.load`.

        `overrides`: settings that `Config.load` takes as keywords. `read`: a function that returns the content of a
        YAML file. Raises ConfigError for a source that cannot be read.
        """
        for name, given, kind, form in (
            ("file", file, str | os.PathLike | None, "a path (settings are keywords)"),
            ("env", env, Mapping, "a mapping, such as os.environ or {}"),
            ("ranks", ranks, int | None, "a whole number"),
        ):
            if not isinstance(given, kind):
                raise ConfigError(f"{name} must be {form}, not a {type(given).__name__}")
        extra, file = flat(extra or {}), file or env.get(ENV_FILE)
        settings = list(given_settings(overrides, file, env, extra, read))
        theirs, warnings = lmcache.named(env, extra), [*checks.name_warnings(env), *lmcache.misspelled(env)]
        if file and not any(source == f"file {file}" for _, _, source in settings):
            warnings.append(f"file {file} sets nothing: write a line such as chunk_size: 256")
        if not theirs or settings or file:
            if theirs:
                warnings.append(lmcache.not_read(theirs, [f"{key} ({source})" for key, _, source in settings]))
            return cls._of(settings, [], _warnings(warnings))
        translation = lmcache.translate(env, extra, read, ranks)
        translation.notes += _warnings(warnings)
        remarks, notes = translation.remarks(), translation.notes
        return cls._of(translation.settings, translation.readings, notes, remarks=remarks, of_lmcache=True)

    @classmethod
    def to_command(cls, words: Sequence[str], ranks: int | None = 1) -> tuple[Self, Command]:
        """Read a command line of LMCache's server or of `vllm serve`. Returns the result of reading the
        settings, and the `Command` that starts an engine with lmkv instead.

        `ranks`: the number of ranks of the engine, if the command's options do not set it. Raises ConfigError for any
        other command line.
        """
        command = command_lines.translated(words, ranks)
        file = command.variables.get(ENV_FILE, "")
        if file and not os.path.exists(os.path.expanduser(file)):
            command.inform(f"{ENV_FILE} {file} is not on this machine, so its settings are not checked")
            file = ""
        own = list(given_settings({}, file, command.variables, {}, read_yaml))
        readings = [Reading(key, source, "used", key) for key, _, source in own if key in OPTIONS]
        given = [*own, *command.settings]
        answer = cls._of(given, [*readings, *command.readings], command.notes, of_lmcache=True, command=command)
        if (config := answer.config) is not None:
            named = {word.partition("=")[0].removeprefix("-e"): word for word in command.start if "=" in word}
            warnings = [*checks.name_warnings(named), *checks.command_warnings(config, command)]
            warnings += containers.warnings(command.start, config)
            answer = evolve(answer, notes=(*answer.notes, *_warnings(warnings)))
        return answer, command

    @classmethod
    def _of(
        cls,
        settings: Iterable[tuple[Any, object, str]],
        readings: Iterable[Reading],
        notes: Sequence[tuple[int, str]],
        *,
        remarks: Sequence[tuple[int, str]] = (),
        of_lmcache: bool = False,
        command: Command | None = None,
    ) -> Self:
        """Return the result for `settings`, each as `(key, value, source)`. A later value of a key replaces an earlier
        value.

        If `command` is given, a note names each replaced value.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        settings, readings = list(settings), list(readings)
        own, problems = list[Reading](), [str(each) for each in readings if each.kind == "refused"]
        unknown = 0
        for key, value, source in settings:
            unknown += key not in OPTIONS
            if unknown > lmcache.MAX_NAMES and key not in OPTIONS:
                continue
            try:
                parsed = parse(_known(key, value, source), value, source)
            except ConfigError as error:
                problems.append(str(error))
                own.append(Reading(str(key), source, "refused", why=str(error).removeprefix(f"{source}: ")))
                continue
            if command is not None and key in values and values[key].value != parsed.value:
                # Merged connectors had each their own; in vLLM, too, one option replaces another.
                level = logging.WARNING if command.merged else logging.INFO
                now, before = (in_words(readable(each.value)) for each in (parsed, values[key]))
                notes = [*notes, (level, f"{key}: {now} ({source}) replaces {before} ({sources[key]})")]
            if value is None and source.startswith("file ") and OPTIONS[key].metadata["parse"] is secret:
                told = "has no value: put the value into quotes, because # begins a comment in YAML"
                notes = [*notes, (logging.WARNING, f"{source}: {key} {told}")]
            values[key], sources[key] = parsed, source
            own.append(Reading(key, source, "used", f"{key} = {in_words(readable(parsed.value))}"))
        if theirs := lmcache.files_of(settings, OPTIONS):
            told = f"name the file in {lmcache.ENV_FILE}, or convert the file with lmkv config migrate"
            problems.insert(0, f"{theirs[0]} has settings of LMCache: {told}")
        if unknown > lmcache.MAX_NAMES:
            problems.append(f"{unknown - lmcache.MAX_NAMES} more keys are unknown")
        config = None
        try:
            config = Config(**values, sources=sources)
        except ConfigError as error:
            # A consequence of a refused setting is not a separate problem.
            refused = {each.key for each in (*own, *readings) if each.kind == "refused"} & OPTIONS.keys()
            problems += [line for line in str(error).splitlines() if not any(key in line for key in refused)]
        more = [] if config is None or problems else _warnings(checks.warnings(config, () if of_lmcache else values))
        if config is not None:
            config = evolve(config, remarks=(*(remarks or notes), *more))
        found = {name: parsed.value for name, parsed in values.items()}
        shown = own
        if of_lmcache:
            bad = {each.key: each for each in own if each.kind == "refused"}
            shown = [
                evolve(bad[each.here], key=each.key) if each.here in bad else _with_value(each, found)
                for each in readings
            ]
        answer = tuple(shown), (*notes, *more), of_lmcache, tuple(problems), found
        return cls(None if problems else config, *answer)

    @property
    def status(self) -> int:
        """Exit status of a command. It is 2 if a setting is refused, 1 for a warning or an unknown setting, else 0."""
        matters = any(level >= logging.WARNING for level, _ in self.notes)
        return 2 if self.problems else int(matters or any(each.kind == "unknown" for each in self.readings))

    def checked(self) -> Config:
        """Return the configuration. Raises ConfigError with the texts of all problems if a setting is refused."""
        if self.config is None:
            raise ConfigError("\n".join(self.problems))
        return self.config


def _warnings(texts: Iterable[str]) -> list[tuple[int, str]]:
    return [(logging.WARNING, text) for text in texts]


def _with_value(reading: Reading, values: Mapping[str, object]) -> Reading:
    name = reading.here
    return evolve(reading, here=f"{name} = {in_words(readable(values[name]))}") if name in values else reading


def _known(key: Any, value: object, source: str) -> Attribute[Any]:
    if key in OPTIONS:
        return OPTIONS[key]
    visible = "'***'" if isinstance(key, str) and SECRET.search(key[:100]) else short_repr(typed(value))
    if isinstance(value, Mapping | list):
        # A password may be in it.
        visible = "{...}" if isinstance(value, Mapping) else "[...]"
    raise ConfigError(f"{source}: unknown key {short_repr(key)} = {visible}{hint(key, value, OPTIONS)}")
