"""The `lmkv` command's application: its subcommands by name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lmkv import __version__
from lmkv.cli import bench, checkpoint, config, demo, doctor, inspect, record, server, simulate, top

app = typer.Typer(
    name="lmkv",
    help="Store the KV cache of long prompts outside the device, and load it instead of computing it again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.bench)
app.add_typer(config.app, name="config")
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("prune")(inspect.prune)
app.command("clear")(inspect.clear)
app.command("record")(record.record)
app.command("simulate")(simulate.simulate)
app.command("top")(top.top)
app.command("lookup")(server.lookup)
app.command("prefetch")(server.prefetch)
app.command("pin")(server.pin)
app.command("unpin")(server.unpin)
app.command("model")(checkpoint.model)


@app.command("version")
def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the version of lmkv."""
    typer.echo(json.dumps({"version": __version__}) if as_json else __version__)
