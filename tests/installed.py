"""An lmkv that was installed as users do it is complete: python -I tests/installed.py CHECKOUT

Run by tox outside of the checkout; `-I` keeps what is beside this script, or in the working folder, from being found.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import lmkv


def main(checkout: Path) -> None:
    installed = Path(lmkv.__file__).parent
    assert "site-packages" in installed.parts, installed
    assert content(installed) == content(checkout / "lmkv")
    assert {"py.typed", "config/lmcache.toml", "config/commands.toml", "agent/page.html"} <= content(installed)

    ours = distribution("lmkv")
    assert any(file.match("licenses/LICENSE") for file in ours.files or []), ours.files
    assert {file.parts[0] for file in ours.files or []} <= {"lmkv", f"lmkv-{ours.version}.dist-info", ".."}

    printed = subprocess.run(
        [Path(sys.executable).with_name("lmkv"), "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == lmkv.__version__ == ours.version
    [plugin] = entry_points(group="vllm.general_plugins", name="lmkv")
    assert callable(plugin.load())
    for name in lmkv.__all__:
        getattr(lmkv, name)
    print(f"lmkv {ours.version} is complete in {installed}")


def content(package: Path) -> set[str]:
    """Names of its files, compiled ones left out."""
    return {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
