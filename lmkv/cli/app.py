"""The `lmkv` command's application: its subcommands by name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lmkv import __version__
from lmkv.cli import bench, checkpoint, config, demo, doctor, inspect, server, simulate, top

app = typer.Typer(
    name="lmkv",
    help="Store the KV cache of long prompts outside the device, and load it instead of computing it again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(config.app, name="config")
for command in (
    *(bench.bench, demo.demo, doctor.doctor, inspect.inspect, inspect.prune, inspect.clear, server.record),
    *(simulate.simulate, top.top, server.lookup, server.prefetch, server.pin, server.unpin, checkpoint.model),
):
    app.command()(command)


@app.command("version")
def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the version of lmkv."""
    typer.echo(json.dumps({"version": __version__}) if as_json else __version__)
