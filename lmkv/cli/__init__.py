"""The `lmkv` command: one module per subcommand, collected in `lmkv.cli.app`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `lmkv` command, or name the extra to install when its dependencies are missing."""
    try:
        from lmkv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit('The lmkv command needs its extra: pip install "lmkv[cli]"')
    app()
