"""The `lmkv` command: one module per subcommand, put together in `lmkv.cli.app`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `lmkv` command; without its extra installed, say what to install."""
    try:
        from lmkv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit('The lmkv command needs its extra: pip install "lmkv[cli]"')
    app()
