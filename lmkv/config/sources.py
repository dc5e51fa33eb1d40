"""Sources of settings: keyword arguments, files, environment variables, and vLLM's extra configuration."""

from __future__ import annotations

import json
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lmkv.config import lmcache
from lmkv.config.lmcache import EXTRA, SERVICE_LINK, VARIABLE
from lmkv.errors import ConfigError, outside, short_repr

# -- files that somebody has named ------------------------------------------------------------------------


SMALL: Final = 1 << 17
"""Largest number of bytes in a file with settings or a secret."""
_WRITER: Final = 1.0
_SILENCE: Final = 5.0
_PATIENCE: Final = 10.0
"""Seconds to wait for a writer of a pipe, for its next bytes, and for the end of its content."""


def read_named(path: str | os.PathLike[str], limit: int = SMALL, *, pipes: bool = True) -> bytes:
    """Return the content of a file or of a pipe, such as the shell's `<(...)`.

    Raises OSError for any other path, and for more than `limit` bytes. `pipes`: whether a pipe may be read.
    """
    fd, mode = _opened(path, pipes=pipes)
    try:
        until, data = time.monotonic() + _PATIENCE, bytearray()
        while len(data) <= limit and (part := _part(fd, limit + 1, until, begun=bool(data) or stat.S_ISREG(mode))):
            data += part
        if len(data) > limit:
            raise OSError(f"the file has more than {limit:,} bytes")
        return bytes(data)
    finally:
        os.close(fd)


def _opened(path: str | os.PathLike[str], *, pipes: bool) -> tuple[int, int]:
    """Open a file or pipe, and return `(file descriptor, mode)`.

    Devices are not opened, because opening a device may have effects.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise OSError("the path is a folder: name a file" if stat.S_ISDIR(mode) else "the path is not a file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), mode
    except OSError as error:
        if error.filename is not None:
            error.filename = os.fspath(path)
        raise
    finally:
        os.close(place)


def _part(fd: int, most: int, until: float, *, begun: bool) -> bytes:
    """Return the next bytes of a file or pipe, or b"" at the end. Raises OSError if a pipe's writer is too slow.

    `begun`: whether b"" means the end. Otherwise a writer may still open the pipe.
    """
    left, said = until - time.monotonic(), "nobody writes into the pipe"
    try:
        if (part := os.read(fd, most)) or begun:
            return part
        patience = min(_WRITER, left)
    except BlockingIOError:
        # There is a writer, who has not written yet.
        patience = min(_SILENCE, left)
        said = f"the writer is slow: nothing came for {_SILENCE:.0f} s, or not all within {_PATIENCE:.0f} s"
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if left <= 0 or not poll.poll(patience * 1000):
        raise OSError(f"the path is a pipe, and {said}")
    return os.read(fd, most)


# -- all sources ------------------------------------------------------------------------------------------


KEYWORD: Final = "keyword"
ENV_PREFIX: Final = "LMKV_"
ENV_FILE: Final = "LMKV_CONFIG_FILE"
ENV_LEVEL: Final = "LMKV_LOG_LEVEL"
RESERVED_ENV: Final = frozenset({ENV_FILE, ENV_LEVEL, "LMKV_CHECK_LOCKS"})


def given_settings(
    overrides: Mapping[str, object],
    file: str | os.PathLike[str] | None,
    env: Mapping[str, str],
    extra: Mapping[Any, object],
    read: Callable[[Path], Mapping[Any, object]],
) -> Iterator[tuple[Any, object, str]]:
    """Yield `(key, value, source)` for each setting of the user.

    The settings come from `overrides`, `file`, `env` and `extra`, in this order. If several have a key, the last one
    counts. `read`: a function that returns the content of `file`.
    """
    for key, value in overrides.items():
        yield key, value, KEYWORD
    if file:
        for key, value in read(Path(os.path.expanduser(file))).items():
            yield key, value, f"file {os.fspath(file)}"
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and name not in RESERVED_ENV and not SERVICE_LINK.fullmatch(name):
            yield name.removeprefix(ENV_PREFIX).lower(), env[name], f"{VARIABLE}{name}"
    for name, value in extra.items():
        if lmcache.owns(name):
            continue
        key = name.removeprefix("lmkv.") if isinstance(name, str) else name
        if key != name and key in extra:
            raise ConfigError(f"{EXTRA}: both {key!r} and {name!r} are given: remove one")
        yield key, value, EXTRA


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of variables, of a script or of a unit. Raises ConfigError if it cannot be read."""
    try:
        return read_named(path).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"file {path}: {error}") from None


def variables_in(text: str) -> dict[str, str]:
    """Return the variables of an env file, without its comments. Raises ConfigError for a line that is not
    NAME=VALUE.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)=('[^']*'|\"[^\"]*\"|.*?)(\s+#.*)?", line)
            if match is None:
                raise ConfigError(f"line {number} is not NAME=VALUE")
            found[match[1]] = match[2]
    return found


def flat(extra: object) -> dict[Any, object]:
    """Return the settings without nested mappings, which vLLM creates from options with dots in their names.

    For example, {"lmkv": {"chunk_size": 64}} becomes {"lmkv.chunk_size": 64}. Raises ConfigError if `extra` is not a
    mapping.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{EXTRA}: must be a mapping of keys to values, not a {type(extra).__name__}")
    found = dict(extra)
    for name in [name for name in found if name in ("lmkv", "lmcache", "lmcache.mp")]:
        if isinstance(inner := found[name], Mapping):
            del found[name]
            found |= flat({f"{name}.{key}": value for key, value in inner.items()})
    return found


def read_yaml(path: Path, *, pipes: bool = True) -> dict[Any, object]:
    """Return the mapping in a YAML file. Numbers stay text, for the parsers of settings.

    Raises ConfigError for any other content. `pipes`: whether a pipe may be read; afterwards, the pipe is empty.
    """
    # Imported here, because most engines have no file.
    import yaml

    class Loader(yaml.SafeLoader):
        """A YAML loader that keeps 0400, 1:30 and 1.50 as text. Aliases and duplicate keys are errors.

        A few lines with aliases of aliases (`*name`, `<<: *name`) could expand to gigabytes.
        """

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [each for each in resolvers if not each[0].endswith((":int", ":float", ":timestamp"))]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                why = "aliases (*name) are not allowed: write the value instead"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=self.current_event.start_mark)
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, AttributeError, ArithmeticError):
                # These quote the value, which may be a password.
                line = f"line {node.start_mark.line + 1}"
                raise yaml.YAMLError(f"{line}: the value does not fit its !!tag: leave the tag out") from None

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                name, line = key.value, key.start_mark.line + 1
                if name in lines:
                    twice = f"{short_repr(name)} is given twice, in lines {lines[name]} and {line}"
                    raise yaml.YAMLError(f"{twice}: leave one out")
                lines[name] = line
            return super().construct_mapping(node, deep)

    try:
        text = read_named(path, pipes=pipes).decode()
        # JSON has tabs where it likes.
        content = yaml.load(text.expandtabs() if path.suffix == ".json" else text, Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"file {path}: {_yaml_reason(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        form = "write each setting as a line such as chunk_size: 256, with a blank after the colon and without a dash"
        variables = "for a container's variables run lmkv config migrate -- LMCACHE_CHUNK_SIZE=256 vllm serve ..."
        raise ConfigError(f"file {path}: the content is not a mapping of settings: {form}; {variables}")
    return content


def _yaml_reason(error: Exception) -> str:
    """Return a text with the error and its line number. The text quotes nothing from the file, which may have
    passwords.
    """
    if isinstance(error, FileNotFoundError):
        return "not found on this machine: correct the path"
    if isinstance(error, UnicodeDecodeError):
        return "the file is not text: name a YAML file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return outside(str(error))
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    if problem == "but found another document":
        return f"{place}: the file has several YAML documents: name a file with the settings only"
    # A quoted sign or `<name>` is YAML's, any other text the file's.
    ours = re.compile(r"""(['"])(?:.|<[\w ]+>)\1""")
    problem = re.sub(
        r"""(['"])(?:\\.|(?!\1).)*\1""", lambda found: found[0] if ours.fullmatch(found[0]) else "...", problem
    )
    if problem == "found unhashable key":
        return f"{place}: a key is in brackets: replace {{{{ name }}}} by the value"
    line = mark.buffer[mark.buffer.rfind("\n", 0, mark.pointer) + 1 :] if mark.buffer else ""
    if problem == "mapping values are not allowed here" and line[:1] == " ":
        return f"{place}: this line is indented more than the line above: begin each setting at the start of its line"
    form = "write key: value, with a blank after the colon"
    return f"{place}: {problem}; {form}; put a value with : or # or a leading sign in quotes, and use no tabs"


def typed(value: object) -> object:
    """Return a value of `read_yaml`, with texts that look like numbers converted to numbers."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(typed, value))
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?", value):
        return json.loads(value)
    return value
