"""The application of the `lmkv` command. A subcommand's module is imported only when the subcommand runs."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from lmkv import __version__

UsageError: Any = typer.BadParameter.__base__
TRY, CONFIGURE, FOLDERS, SERVERS = "Try", "Configure", "Folders of chunks", "Running servers"
COMMANDS = {
    "demo": ("lmkv.cli.demo", TRY, "Send long prompts to real vLLM twice, and compare the times to the first token."),
    "bench": ("lmkv.cli.bench", TRY, "Benchmark this machine: copies, lookups, the disk, and a hit on real vLLM."),
    "simulate": ("lmkv.cli.simulate", TRY, "Compare eviction policies on a request trace."),
    "model": (
        "lmkv.cli.small_model",
        TRY,
        "Write a small Qwen3-like model with random weights and a tokenizer for text.",
    ),
    "doctor": (
        "lmkv.cli.doctor",
        CONFIGURE,
        "Check the configuration, this machine and the remote stores before a start.",
    ),
    "config": (
        "lmkv.cli.config",
        CONFIGURE,
        "Show, check and convert settings, lmkv's own and those of other connectors.",
    ),
    "inspect": ("lmkv.cli.inspect", FOLDERS, "Show the models, chunks, tokens, bytes and ages in a folder."),
    "prune": ("lmkv.cli.inspect", FOLDERS, "Delete the chunks of a folder that were used least recently."),
    "clear": ("lmkv.cli.inspect", FOLDERS, "Delete all chunks of a folder or, with --url, of a running server."),
    "top": ("lmkv.cli.top", SERVERS, "Watch a running server's tiers and requests."),
    "lookup": (
        "lmkv.cli.server",
        SERVERS,
        "Show how many tokens of a prompt a server would load, and from which tiers.",
    ),
    "prefetch": (
        "lmkv.cli.server",
        SERVERS,
        "Load a prompt's chunks into a server's host memory, ahead of its request.",
    ),
    "pin": ("lmkv.cli.server", SERVERS, "Keep a prompt's chunks in a server's host memory for a while."),
    "unpin": ("lmkv.cli.server", SERVERS, "End the pins of a prompt's chunks."),
    "record": ("lmkv.cli.server", SERVERS, "Record which chunks a server's requests use, for `lmkv simulate`."),
}
"""For each command its module, its heading in the help, and its line in the help."""

_SERVE = "vllm serve MODEL --kv-transfer-config, as the README has it"
ELSEWHERE = {
    **{name: f"lmkv config {name}" for name in ("show", "check", "migrate")},
    **dict.fromkeys(("serve", "server", "start", "run"), _SERVE),
    **dict.fromkeys(("status", "stats", "monitor"), "lmkv top"),
}
"""For each name that users may try, the command that such users want."""
HINTS = {
    r"--(config|config-file|file)$": "name the file as an argument, without an option",
    r"extra argument\S* \(\S+:\d+\)": "give a server's address with --url",
}
"""For each form of a usage error, advice about what to write instead."""

EXAMPLES = (
    "Examples:",
    'lmkv doctor --extra \'{"local_disk": "/nvme/kv", "max_local_disk_size": 100}\'',
    "lmkv config migrate -- vllm serve Qwen/Qwen3-8B --kv-offloading-size 64",
    "lmkv top --url 127.0.0.1:8377",
)


class Commands(TyperGroup):
    """The subcommands by name. The help shows one line for each subcommand, and imports none of their modules."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, panel, line) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.load(args[0])
        elif args[0] in ELSEWHERE:
            ctx.fail(f"No such command {args[0]!r}: use {ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            found = [hint for form, hint in HINTS.items() if re.search(form, error.message)]
            error.message = "; ".join([error.message, *found])
            raise

    def load(self, name: str) -> None:
        """Import a subcommand's module, and add the subcommand with all its options to this group."""
        module, panel, _ = COMMANDS[name]
        found = getattr(import_module(module), "app" if name == "config" else name)
        if not isinstance(found, typer.Typer):
            own = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            own.command(name, rich_help_panel=panel)(found)
            found = own
        command = get_command(found)
        self.add_command(command, name)
        for each in (command, *getattr(command, "commands", {}).values()):
            helps: Any = each.get_help_option(typer.Context(each))
            for option in (*each.params, helps):
                if getattr(option, "is_flag", False):
                    # It takes no value.
                    option.metavar = ""


app = typer.Typer(
    name="lmkv",
    cls=Commands,
    help="Store the KV cache of long prompts outside the device, and load it instead of computing it again.",
    epilog="\n\n".join(EXAMPLES),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def lmkv(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
