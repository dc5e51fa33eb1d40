"""`lmkv inspect`, `lmkv prune` and `lmkv clear`: show and delete the chunks in a folder of the disk tier.

Engines may use the folder at the same time. If an engine needs a deleted chunk, this is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict, define, field, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.chunkfile import ChunkFiles
from lmkv.backends.disk.fileio import Folder, ShortReadError, read_fully
from lmkv.backends.disk.folder import QUARANTINE, ChunkFolder, description, digests
from lmkv.backends.disk.root import NotTrustedError, Root
from lmkv.chunks import codec
from lmkv.chunks.codec import ChunkFormat, Header
from lmkv.chunks.namespace import Namespace
from lmkv.cli import server
from lmkv.cli.server import SECONDS, duration, fail, give
from lmkv.config import GIB, parsers
from lmkv.config.advice import written_instead
from lmkv.errors import BackendError, mask_secrets
from lmkv.protocols import Listed

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4


@frozen
class Content:
    """The content of a namespace's folder. `chunks`: the chunks, least recently used first.

    `set_aside`: number of files in `quarantine/`.
    """

    root: Path
    digest: bytes
    namespace: Namespace | None
    chunks: list[Listed]
    set_aside: int

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


@define
class Totals:
    """Sums over all chunks of a namespace. `damaged`: for each damaged file, its name and the reason."""

    tokens: int = 0
    damaged: dict[str, str] = field(factory=dict)


def contents(root: Path, beginning: str = "") -> Iterator[Content]:
    """Yield the content of each namespace below the folder `root`. Raises OSError.

    `beginning`: only namespaces whose digests begin with these digits are returned.
    """
    for digest in digests(root, beginning):
        try:
            yield _content(root, digest)
        except NotTrustedError as error:
            logger.warning("lmkv: the command skips a folder: %s", error)


def _content(root: Path, digest: bytes) -> Content:
    folder = ChunkFolder(Root.checked(root), digest)
    chunks = sorted(folder.scan(), key=lambda chunk: chunk.last_used)
    count = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder.entered(QUARANTINE) as quarantine:
        count = sum(1 for _ in quarantine.entries())
    return Content(root, digest, description(folder.path), chunks, count)


def add_up(content: Content, advance: Callable[[], object], *, payloads: bool) -> Totals:
    """Return the number of tokens in all chunks, and the damaged files. Calls `advance` after each chunk.

    Reads every header, and with `payloads` also every payload. A chunk that is deleted meanwhile does not count.
    """
    folder, totals = ChunkFolder(Root.checked(content.root), content.digest), Totals()
    files = ChunkFiles(ChunkFormat(content.digest), sync="none", direct=False)
    for chunk in content.chunks:
        try:
            with folder.place_of(chunk.key) as (place, name):
                header = files.header(place, name, chunk.key)
                if payloads:
                    _verify(place, name, header)
            totals.tokens += len(header.tokens) // _TOKEN_BYTES
        except FileNotFoundError:
            pass
        except (codec.FormatError, ShortReadError, OSError) as error:
            totals.damaged[folder.path_of(chunk.key)] = str(error)
        advance()
    return totals


def _verify(folder: Folder, name: str, header: Header) -> None:
    """Verify all checksums of a file. Does not count as a use of the chunk. Raises the exceptions of a failed read."""
    size = header.segment_bytes
    with folder.opened(name, os.O_RDONLY) as fd:
        for segment, at in enumerate(range(0, header.payload_bytes, size)):
            part = memoryview(bytearray(min(size, header.payload_bytes - at)))
            read_fully(fd, [part], header.header_bytes + at)
            codec.verify_segments(header, part, segment)


def delete(root: Path, chunks: Mapping[bytes, list[Listed]], advance: Callable[[], object]) -> int:
    """Delete chunks, and return the number of freed bytes. `chunks`: by namespace digest. Raises BackendError."""
    freed = 0
    for digest, listed in chunks.items():
        backend = LocalDiskBackend(str(root), digest, direct="off")
        for chunk in listed:
            freed += backend.reclaim([chunk.key])
            advance()
        backend.close()
    return freed


def least_recently_used(found: list[Content], before: float, max_bytes: float) -> dict[bytes, list[Listed]]:
    """Return the chunks to delete, by namespace digest: all chunks that were last used earlier than `before`.

    `before`: a time, in seconds since 1970. If more than `max_bytes` bytes would remain, also return further
    chunks, least recently used first.
    """
    excess = sum(content.nbytes for content in found) - max_bytes
    chosen: dict[bytes, list[Listed]] = {}
    by_use = sorted(((chunk, one.digest) for one in found for chunk in one.chunks), key=lambda pair: pair[0].last_used)
    for chunk, digest in by_use:
        if not (chunk.last_used < before or excess > 0):
            break
        chosen.setdefault(digest, []).append(chunk)
        excess -= chunk.nbytes
    return chosen


# -- the commands -----------------------------------------------------------------------------------------


_SHOWN_DIGITS = 12

_FOLDER = "The folder that local_disk names."


def folder_of(text: str) -> Path:
    """Return the folder for a path or a file URL, in any form that the setting `local_disk` accepts."""
    shown = mask_secrets(text)
    try:
        found = Path(parsers.path(text) or text)
    except ValueError as error:
        raise typer.BadParameter(f"{shown!r} {error}; for a remote store use lmkv doctor") from None
    if not found.is_dir():
        raise typer.BadParameter(f"{shown!r} is not a folder: give the folder of local_disk, or a server with --url")
    return found


_ARGUMENT = typer.Argument(parser=folder_of, metavar="FOLDER", help=_FOLDER)
Below = Annotated[Path, _ARGUMENT]
Which = Annotated[
    str, typer.Option("--namespace", metavar="DIGITS", help="Only namespaces that begin with these hexadecimal digits.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def inspect(
    path: Below,
    verify: Annotated[bool, typer.Option("--verify", help="Read every chunk and check its checksums.")] = False,
    namespace: Which = "",
    as_json: AsJson = False,
) -> None:
    """Show the models, chunks, tokens, bytes and ages in a folder. The exit code is 1 if a chunk is damaged."""
    found = found_in(path, namespace)
    with progress("verifying" if verify else "reading", sum(len(one.chunks) for one in found)) as advance:
        totals = [add_up(one, advance, payloads=verify) for one in found]
    answer = {"path": str(path), "namespaces": list(map(as_dict, found, totals))}
    give(answer, lambda: show(found, totals), as_json=as_json)
    damaged = {file: why for total in totals for file, why in total.damaged.items()}
    for file, why in damaged.items():
        typer.echo(f"damaged: {file}: {why}", err=True)
    raise typer.Exit(1 if damaged else 0)


def prune(
    path: Below,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Delete chunks that were not used for this time: 30m, 12h, 7d, 2w.")
    ] = "",
    max_size: Annotated[
        str, typer.Option(metavar="GIB", help="Delete chunks until at most this size is left, in GiB.")
    ] = "",
    namespace: Which = "",
    as_json: AsJson = False,
) -> None:
    """Delete the chunks of a folder that were used least recently."""
    if not older_than and not max_size:
        raise typer.BadParameter("give --older-than, --max-size or both")
    before = time.time() - seconds_of(older_than) if older_than else -math.inf
    most = bytes_of(max_size) if max_size else math.inf
    remove(path, least_recently_used(found_in(path, namespace), before, most), as_json=as_json)


def clear(
    path: Annotated[Path | None, _ARGUMENT] = None,
    namespace: Which = "",
    url: Annotated[
        str, typer.Option(help="Address of a running server's agent API: unix:/path, HOST:PORT or URL.")
    ] = "",
    text: Annotated[
        str, typer.Option(help="With --url: delete only this prompt's chunks; - reads the prompt from standard input.")
    ] = "",
    tokens: server.TokenIds = "",
    cache_salt: server.Salt = None,
    tag: server.Tags = None,
    engine: server.Number = None,
    token_file: server.TokenFile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all chunks of a folder, or with --url those of a running server, of a prompt or of a namespace."""
    if (path is None) == (not url):
        raise typer.BadParameter("say what to clear: a folder, or a server with --url")
    of_a_prompt = text or tokens or cache_salt or tag
    if (of_a_prompt or engine is not None) and not url:
        raise typer.BadParameter("only a server can clear a prompt or one engine: give the server's address with --url")
    if of_a_prompt and namespace:
        raise typer.BadParameter("give a prompt or --namespace, not both")
    if path is None:
        prompt = server.prompt_of(text, tokens) if text or tokens else None
        scope = server.scope_of(cache_salt, tag, engine)
        if prompt is None and not yes:
            whose = f"namespace {namespace} at {url}" if namespace else f"{url} from every tier"
            ask(f"Delete all chunks of {whose}?")
        with server.client_of(url, token_file) as client:
            answer = client.clear(prompt, namespace=namespace or None, **scope)
            deleted = "deleted {deleted_chunks:,} chunks".format_map
            give(answer, lambda: server.show(answer, deleted), as_json=as_json)
        return
    chunks = {one.digest: one.chunks for one in found_in(path, namespace)}
    count = sum(map(len, chunks.values()))
    if count and not yes:
        ask(f"Delete {count:,} chunks below {path}?")
    remove(path, chunks, as_json=as_json)


def ask(question: str) -> None:
    """Ask for confirmation. Exits unless the answer is yes.

    The question goes to standard error, because standard output may be a pipe.
    """
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def found_in(path: Path, namespace: str) -> list[Content]:
    """Return the content of a folder. Exits with an error if the folder has files but no chunks, or is unreadable."""
    try:
        found = list(contents(path, namespace))
        empty = not any(path.iterdir())
    except OSError as error:
        fail(error)
    if not found and not empty:
        fail(f"{path} has no lmkv chunks{f' in a namespace that begins with {namespace}' if namespace else ''}")
    return found


def seconds_of(duration: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", duration.strip().lower())
    if match is None:
        raise typer.BadParameter(
            f"{duration!r} is not a duration such as 30m, 12h, 7d or 2w", param_hint="--older-than"
        )
    return float(match[1]) * SECONDS[match[2]]


def bytes_of(gib: str) -> float:
    try:
        return float(parsers.number(0)(gib)) * GIB
    except ValueError as error:
        why = f"{gib!r} {error}{written_instead('GiB', gib)}"
        raise typer.BadParameter(why, param_hint="--max-size") from None


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """Show a progress bar on a terminal during a `with` block. Elsewhere, show nothing."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def remove(path: Path, chunks: Mapping[bytes, list[Listed]], *, as_json: bool) -> None:
    count = sum(map(len, chunks.values()))
    try:
        with progress("deleting", count) as advance:
            freed = delete(path, chunks, advance)
    except BackendError as error:
        fail(error)
    words = f"deleted {count:,} chunks, {freed / GIB:.2f} GiB"
    give({"path": str(path), "chunks": count, "bytes": freed}, lambda: typer.echo(words), as_json=as_json)


def as_dict(content: Content, totals: Totals) -> dict[str, object]:
    now, uses = time.time(), [chunk.last_used for chunk in content.chunks]
    namespace = content.namespace
    return {
        "namespace": content.digest.hex(),
        "described": None if namespace is None else asdict(namespace) | {"extra": dict(namespace.extra)},
        "chunks": len(content.chunks),
        "tokens": totals.tokens,
        "bytes": content.nbytes,
        "oldest_use_seconds": now - uses[0] if uses else None,
        "latest_use_seconds": now - uses[-1] if uses else None,
        "set_aside": content.set_aside,
        "damaged": totals.damaged,
    }


def show(found: list[Content], totals: list[Totals]) -> None:
    """Print a table of namespaces. Long names of models are wrapped.

    The cells are `Text` objects, because rich would read markup in a str.
    """
    if not found:
        typer.echo("No lmkv chunks: the folder is empty")
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("namespace", "model", "dtype", "chunks", "tokens", "GiB", "last used"):
        right = name in ("chunks", "tokens", "GiB", "last used")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name != "model")
    for one, total in zip(found, totals, strict=True):
        uses = [chunk.last_used for chunk in one.chunks]
        row = (
            one.digest.hex()[:_SHOWN_DIGITS],
            one.namespace.model if one.namespace else "not described",
            one.namespace.dtype.removeprefix("torch.") if one.namespace else "",
            f"{len(one.chunks):,}",
            f"{total.tokens:,}",
            f"{one.nbytes / GIB:.2f}",
            ages(uses),
        )
        table.add_row(*map(Text, row))
    console = Console()
    console.print(table)
    for one in found:
        if one.set_aside:
            console.print(Text(f"{one.digest.hex()[:_SHOWN_DIGITS]}: {one.set_aside} entries in quarantine/"))


def ages(uses: list[float]) -> str:
    """Return the ages of the latest and the oldest of `uses` (sorted times in seconds since 1970) as text."""
    if not uses:
        return ""
    now = time.time()
    latest, oldest = duration(now - uses[-1]), duration(now - uses[0])
    return f"{latest} ago" if latest == oldest else f"{latest} to {oldest} ago"
