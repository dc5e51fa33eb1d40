"""Finds commands in shell scripts, such as those in manifests, and quotes words for a shell."""

from __future__ import annotations

import re
import shlex

from lmkv.config.command_lines import program
from lmkv.errors import ConfigError, short_repr


def without_shell(words: list[str]) -> tuple[list[str], bool]:
    """Return the command inside `sh -c SCRIPT`, and whether the script has other commands, too.

    The command begins with the variables that the script sets. Words without `sh -c` are returned unchanged.
    """
    flag = next((at for at in range(1, len(words) - 1) if _SHELL.fullmatch(" ".join(words[at - 1 : at + 1]))), None)
    if flag is None:
        return words, False
    before, script, arguments = words[: flag - 1], words[flag + 1], words[flag + 3 :]
    parts = [
        [each for word in part for each in (arguments if word in ("$@", "$*") else [word])]
        for part in commands_in(script)
    ]
    parts = [part[part[0] in ("export", "exec") :] for part in parts if part]
    variables = [word for part in parts if all("=" in word for word in part) for word in part]
    started = list(filter(program, parts))
    if len(started) > 1:
        raise ConfigError(
            f"{short_repr(script)} starts several servers: give one command at a time, that of lmcache server first"
        )
    # A path may begin with ~, the value that is right for every user.
    values = {"HOME": "~", **dict(word.split("=", 1) for word in variables)}
    found = [
        _NAMED.sub(lambda name: values.get(name[1], name[0]), word)
        for word in (*variables, *(started or parts or [[]])[-1])
    ]
    others = len(parts) > 1 + sum(all("=" in word for word in part) for part in parts)
    return [*before, *["env"] * bool(before and found and "=" in found[0]), *found], others


_NAMED = re.compile(r"(?:\$(?=\w)|\$\{(?=\w+\}))(\w+)\}?")


_SHELL = re.compile(r"(\S*/)?(ba|da|k|z)?sh -[a-z]*c")


def commands_in(script: str) -> list[list[str]]:
    """Return the commands in a shell script, each as a list of words, without redirections into files."""
    script = re.sub(r"\\\n|(?<=\s)[12](?=>)", " ", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    into_file = False
    try:
        for word in lexer:
            if into_file or set(word) <= set(";&|<>\n"):
                into_file = not into_file and ("<" in word or ">" in word)
                found += [[]] * (set(word) <= set(";&|\n"))
            else:
                found[-1].append(word)
    except ValueError as error:
        raise ConfigError(f"{short_repr(script)}: {str(error).lower()}") from None
    return found


def words_of_unit(text: str) -> list[str]:
    """Return the variables and the command of a systemd unit as the words of one command."""
    lines = [line.strip().partition("=") for line in text.replace("\\\n", " ").splitlines()]
    try:
        given = {name: shlex.split(" ".join(value for key, _, value in lines if key == name)) for name in _OF_UNIT}
    except ValueError as error:
        raise ConfigError(f"a quote is missing: {str(error).lower()}") from None
    if not given["ExecStart"]:
        raise ConfigError("the unit has no ExecStart: add the command of vLLM")
    return [*given["Environment"], given["ExecStart"][0].lstrip("@-:+!"), *given["ExecStart"][1:]]


_OF_UNIT = ("Environment", "ExecStart")


def quoted(word: str) -> str:
    """Quote a word for a shell. Variables in the word, such as `$HOME`, stay variables."""
    return f'"{word}"' if _WITH_VARIABLE.fullmatch(word) else shlex.quote(word)


_WITH_VARIABLE = re.compile(r"[\w@%+=:,./-]*(\$(\w+|\{\w+\})[\w@%+=:,./-]*)+")
