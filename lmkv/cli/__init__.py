"""The `lmkv` command. Each module has one or a few subcommands; `lmkv.cli.app` lists all of them."""

from __future__ import annotations

import os
import sys
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC, EPIPE

from lmkv.errors import how_to_install

_CORE = frozenset({"torch", "numpy", "cachetools", "aiofiles"})
"""Dependencies of lmkv that are not needed by commands for running servers."""


def main() -> None:
    """Run the `lmkv` command. If packages are missing, print which extra of lmkv installs them, and exit."""
    try:
        from lmkv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"The lmkv command needs the extra cli: {how_to_install('cli')}")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name not in _CORE:
            raise
        sys.exit(f"this command needs the package {error.name}: install lmkv with its dependencies")
    except OSError as error:
        if error.filename is not None or error.errno not in {ENOSPC, EDQUOT, EFBIG, EIO, EPIPE, EBADF}:
            raise
        # What is left in the buffer would be an error again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"lmkv: the output cannot be written: {error.strerror}")
