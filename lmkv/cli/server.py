"""`lmkv lookup`, `prefetch`, `pin`, `unpin` and `record`: commands that call the agent API of a running server."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from lmkv.config import Config, read_named
from lmkv.errors import ConfigError, how_to_install, printable

if TYPE_CHECKING:
    from lmkv.agent.client import Client

DEFAULT = "127.0.0.1:8377"
_FULL = 503
_MOST = 2048
"""Largest number of items of a list to read. No server has more engines, samples or requests."""

Url = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help=f"Address of the server's agent API: unix:/path, HOST:PORT or URL; by default agent_listen, or {DEFAULT}.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="File with the token in its first line; by default agent_token.",
    ),
]
TokenIds = Annotated[
    str, typer.Option(metavar="IDS", help="The prompt as token ids, such as 1,2,3, instead of a text.")
]
Salt = Annotated[str | None, typer.Option(metavar="SALT", help="The cache_salt that the prompt's requests have.")]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="A tag that the prompt's requests have; may be repeated."),
]
Number = Annotated[
    int | None, typer.Option("--engine", min=0, metavar="N", help="Ask only this engine of the server; by default all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as one JSON object.")]

Prompt = str | list[int]
Answer = dict[str, Any]
Words = Callable[[Answer], str]
"""A function that returns an engine's answer as one line of words."""


def _common(
    text: Annotated[str, typer.Argument(help="The prompt; by default standard input.")] = "-",
    tokens: TokenIds = "",
    cache_salt: Salt = None,
    tag: Tags = None,
    engine: Number = None,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Declare the parameters that all commands about a prompt have. `about_a_prompt` reads this signature."""


def about_a_prompt(command: Callable[..., tuple[Answer, Words]]) -> Callable[..., None]:
    """Turn a function into a subcommand with options for the prompt and the server.

    `command(client, prompt, scope, **options)`: the function. Its `options` become options of the subcommand, too.
    """

    @functools.wraps(command)
    def run(text: str, tokens: str, url: str, token_file: Path | None, as_json: bool, **rest: Any) -> None:
        prompt = prompt_of(text, tokens)
        scope = scope_of(rest.pop("cache_salt"), rest.pop("tag"), rest.pop("engine"))
        with client_of(url, token_file) as client:
            answer, words = command(client, prompt, scope, **rest)
            give(answer, lambda: show(answer, words), as_json=as_json)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[3:]
    common = inspect.signature(_common, eval_str=True).parameters.values()
    # typer reads the options from the signature.
    run.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


@about_a_prompt
def lookup(client: Any, prompt: Prompt, scope: Answer) -> tuple[Answer, Words]:
    """Show how many tokens of a prompt a running server would load, and from which tiers."""
    return client.lookup(prompt, **scope), _looked_up


def _looked_up(found: Answer) -> str:
    where = ", ".join(f"{tokens:,} from {tier.replace('_', ' ')}" for tier, tokens in found["sources"].items())
    return f"{found['hit_tokens']:,} of {found['total_tokens']:,} tokens would be loaded{where and ': '}{where}"


Wait = Annotated[
    float, typer.Option(min=0, max=60, help="Longest time to wait until the prompt is loaded, in seconds.")
]


@about_a_prompt
def prefetch(client: Any, prompt: Prompt, scope: Answer, wait: Wait = 10.0) -> tuple[Answer, Words]:
    """Load a prompt's chunks into a running server's host memory, ahead of its request."""
    return client.prefetch(prompt, wait=wait, **scope), _prefetched


def _prefetched(state: Answer) -> str:
    rest = "" if state["done"] else "; the rest is being read"
    return f"{state['ready_tokens']:,} of {state['found_tokens']:,} stored tokens are in host memory{rest}"


Seconds = Annotated[
    float | None, typer.Option(min=1, max=86_400, help="Seconds to keep the chunks; by default the server's pin_ttl.")
]


@about_a_prompt
def pin(client: Any, prompt: Prompt, scope: Answer, seconds: Seconds = None) -> tuple[Answer, Words]:
    """Keep a prompt's chunks in a running server's host memory for a while."""
    answer = client.pin(prompt, seconds=seconds, **scope)
    return answer, lambda one: f"{one['pinned_tokens']:,} tokens are pinned for {one['seconds']:g} s"


@about_a_prompt
def unpin(client: Any, prompt: Prompt, scope: Answer) -> tuple[Answer, Words]:
    """End the pins of a prompt's chunks."""
    return client.unpin(prompt, **scope), lambda one: f"{one['unpinned_chunks']:,} chunks are unpinned"


# -- shared by them -----------------------------------------------------------------------------------------


def prompt_of(text: str, tokens: str) -> Prompt:
    if tokens:
        try:
            return [int(each) for each in re.findall(r"[^\s,\[\]]+", tokens)]
        except ValueError:
            raise typer.BadParameter(f"{tokens!r} is not a list of token ids such as 1,2,3") from None
    if text != "-":
        return text
    if sys.stdin.isatty():
        raise typer.BadParameter("give the prompt: as TEXT, with --tokens, or on standard input")
    return sys.stdin.read()


def scope_of(cache_salt: str | None, tags: list[str] | None, engine: int | None) -> Answer:
    """Return the fields of a request body for the prompt's salt and tags, and for the engine to ask."""
    pairs = [tag.partition("=") for tag in tags or ()]
    if not all(separator for _, separator, _ in pairs):
        raise typer.BadParameter("write a tag as NAME=VALUE", param_hint="--tag")
    given = {"cache_salt": cache_salt, "tags": {name: value for name, _, value in pairs}, "engine": engine}
    return {name: value for name, value in given.items() if value not in (None, {})}


@contextmanager
def client_of(url: str, token_file: Path | None) -> Iterator[Client]:
    """Yield a client of the server at `url`. An error in the `with` block ends the program with one line."""
    try:
        import httpx

        from lmkv.agent.client import Client
    except ImportError:
        fail(f"this command needs the package httpx: {how_to_install('client')}")
    url, token = address_of(url, token_file)
    try:
        with Client(url, token) as client:
            yield client
    except httpx.HTTPStatusError as error:
        fail(refusal(url, error.response.status_code, error.response.text))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = printable(str(error) or type(error).__name__)
        fail(f"no server answers at {url} ({reason}): start one with agent_listen, or give another address with --url")
    except UnicodeEncodeError:
        fail("the prompt or one of its options is not text in UTF-8")
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        # What was answered has other fields, or other values in them.
        fail(f"{url} is not lmkv's agent API: give the API's address with --url")


def address_of(url: str, token_file: Path | None) -> tuple[str, str | None]:
    """Return `(URL, token)` of the agent API: from the arguments, or else from the server's settings, if found."""
    try:
        token = read_named(token_file).decode().partition("\n")[0].strip() if token_file else None
        if not url or token is None:
            config = Config.load()
            url, token = url or config.agent_listen or DEFAULT, token or config.token
    except (ConfigError, OSError, UnicodeError) as error:
        fail(error)
    if re.match(r"(?!unix:|https?:)[a-z][a-z+.-]*://", url, re.IGNORECASE):
        fail(f"{url} is not the address of an agent API: give --url as unix:/path, HOST:PORT or http://...")
    return url if re.match(r"unix:|https?://", url) else f"http://{url}", token


def refusal(url: str, status: int, text: str) -> str:
    if status == 401:
        return f"{url} refuses the token: give the server's agent_token as LMKV_AGENT_TOKEN or with --token-file"
    try:
        detail = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        if status == _FULL:
            return f"{url} has too many connections: try again later"
        return f"{url} is not lmkv's agent API (HTTP {status}): give the API's address with --url"
    return f"{url}: {printable(str(detail), 500)}"


def clean(answer: Any) -> Any:
    """Return a server's response with control characters removed from its texts, and with long lists cut.

    Raises ValueError for a number of 2**63 or more.
    """
    match answer:
        case str():
            return printable(answer)
        case list():
            return [clean(each) for each in answer[:_MOST]]
        case dict():
            return {clean(name): clean(value) for name, value in islice(answer.items(), _MOST)}
        case int() | float() if not abs(answer) < 1 << 63:
            raise ValueError("an infinite number")
    return answer


def json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise typer.BadParameter("the JSON is nested too deeply", param_hint="--extra") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("""must be a JSON object, such as '{"chunk_size": 256}'""", param_hint="--extra")
    return value


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def duration(seconds: float) -> str:
    unit = max((name for name, length in SECONDS.items() if seconds >= length), key=SECONDS.__getitem__, default="s")
    return f"{max(0.0, seconds) / SECONDS[unit]:.0f}{unit}"


def fail(reason: object, *, as_json: bool = False, status: int = 1) -> NoReturn:
    """Print the reason on standard error, or as JSON on standard output, and exit with `status`."""
    if as_json:
        typer.echo(json.dumps({"ok": False, "problems": str(reason).splitlines()}))
    else:
        typer.echo(str(reason), err=True)
    raise typer.Exit(status)


def give(answer: object, show: Callable[[], object], *, as_json: bool) -> None:
    """Print a response as JSON, or call `show` to print the response as text."""
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        show()


def show(answer: Answer, words: Words) -> None:
    """Print one line for each engine in a response. `words`: a function that returns an engine's line."""
    answer = clean(answer)
    if "engines" not in answer:
        typer.echo(words(answer))
    for each in answer.get("engines", []):
        typer.echo(f"engine {each['engine']}: {unavailable(each) or words(each)}")


def unavailable(engine: Mapping[str, Any]) -> str:
    return f"unavailable: {engine['unavailable']}" if "unavailable" in engine else ""


_POLL_SECONDS = 2.0
_NEWEST = (1 << 63) - 1


def record(
    out: Annotated[Path, typer.Argument(help="File to write, with a JSON object in each line.")],
    url: Url = "",
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to record; 0: until Ctrl+C.")] = 0.0,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Record which chunks a server's requests use, and when, for `lmkv simulate`. Texts and tokens are not recorded."""
    try:
        file = out.open("w", encoding="utf-8")
    except OSError as error:
        fail(f"{out} cannot be written: {str(error.strerror).lower()}; name a file in a folder that you can write to")
    with file, client_of(url, token_file) as client:
        count = 0
        try:
            for count in written(client, file, seconds):
                typer.echo(f"\r{count:,} requests", nl=False, err=True)
        except KeyboardInterrupt:
            pass
    typer.echo("", err=True)
    words = f"{count:,} requests are in {out}; to compare policies run lmkv simulate {out}"
    give({"path": str(out), "requests": count}, lambda: typer.echo(words), as_json=as_json)


def written(client: Client, file: TextIO, seconds: float, poll: float = _POLL_SECONDS) -> Iterator[int]:
    """Record the use of chunks into `file` for `seconds`, or until Ctrl+C if `seconds` is 0.

    After each poll of the server, yields the number of recorded requests.
    """
    # None of those before.
    answer = client.trace(_NEWEST)
    after, count, end = answer["next"], 0, time.monotonic() + seconds if seconds else float("inf")
    header = {"lmkv_trace": 1, "chunk_tokens": answer["chunk_tokens"], "chunk_bytes": answer["chunk_bytes"]}
    file.write(json.dumps(header) + "\n")
    while True:
        yield count
        last = time.monotonic() >= end
        left = 1
        while left:
            # An answer has a bound.
            answer = client.trace(after)
            after, left = answer["next"], answer.get("left", 0)
            count += write_requests(file, answer["requests"])
        if last:
            yield count
            return
        time.sleep(min(poll, max(0.0, end - time.monotonic())))


def write_requests(file: TextIO, requests: list[dict[str, Any]]) -> int:
    file.writelines(json.dumps(request) + "\n" for request in requests)
    file.flush()
    return len(requests)
