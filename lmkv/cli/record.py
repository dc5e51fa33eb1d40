"""`lmkv record`: writes a trace of a running server's requests, to be replayed by `lmkv simulate`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from lmkv.cli.server import TokenFile, client_of

if TYPE_CHECKING:
    from lmkv.agent.client import Client

_POLL_SECONDS = 2.0
_NEWEST = (1 << 63) - 1


def record(
    out: Annotated[Path, typer.Argument(help="File to write: JSON lines.")],
    url: Annotated[str, typer.Argument(help="unix:/path, HOST:PORT or URL; else agent_listen.")] = "",
    seconds: Annotated[float, typer.Option(min=0, help="How long to record; 0: until Ctrl+C.")] = 0.0,
    token_file: TokenFile = None,
) -> None:
    """Record which chunks requests use, and when: no tokens, no text, and names that mean nothing elsewhere."""
    with client_of(url, token_file) as client, out.open("w", encoding="utf-8") as file:
        count = 0
        try:
            for count in written(client, file, seconds):
                typer.echo(f"\r{count:,} requests", nl=False, err=True)
        except KeyboardInterrupt:
            pass
    typer.echo("", err=True)
    typer.echo(f"{count:,} requests in {out}: lmkv simulate {out}")


def written(client: Client, file: TextIO, seconds: float, poll: float = _POLL_SECONDS) -> Iterator[int]:
    """Record for `seconds`, 0 for ever, into `file`; gives the number of requests after each look."""
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
