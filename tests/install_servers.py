"""Install the servers that tests of remote stores speak with, as many as this machine can have, into a folder.

python -m tests.install_servers FOLDER

Run by `python3 dev.py servers`. Valkey and rclone come with the environment. `FOLDER/needed` names all that are there:
their tests must not be skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
SYSTEM = ("redis-server", "libibverbs-dev", "librdmacm1", "libnuma1", "liburing2", "gcc", "libc6-dev")
"""Redis, and what the programs of Mooncake and InfiniStore link to."""


class Failed(Exception):
    """Why a server cannot be there."""


def run(*command: str | Path, seconds: float = 300, **variables: str) -> None:
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")


def pip(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *arguments)


def own_network() -> None:
    """Mooncake's and InfiniStore's programs listen on all addresses: their tests have a network of their own."""
    run("unshare", "-n", "ip", "link", "set", "lo", "up")


def redis(folder: Path) -> None:
    if shutil.which("redis-server") is None:
        raise Failed("no redis-server here, and none could be installed; no test of TLS without it")


def mooncake(folder: Path) -> None:
    pip("-r", REQUIREMENTS / "mooncake.txt")
    run(sys.executable, "-c", "import mooncake.store")
    own_network()


def infinistore(folder: Path) -> None:
    pip("--no-deps", "-r", REQUIREMENTS / "infinistore.txt")
    pip("--no-deps", "--target", folder / "uvloop", "--upgrade", "uvloop==0.21.0")
    if shutil.which("gcc") is None:
        raise Failed("no compiler here")
    own_network()


def moto(folder: Path) -> None:
    """It depends on packages that nothing else needs: it has an environment of its own."""
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder / "moto")
    python = folder / "moto" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "-r", REQUIREMENTS / "moto.txt")
    link(folder, folder / "moto" / "bin" / "moto_server")


def azurite(folder: Path) -> None:
    run("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, "azurite@3.35.0")
    link(folder, *(folder / "node_modules" / ".bin").glob("azurite*"))


def link(folder: Path, *programs: Path) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    for program in programs:
        (folder / "bin" / program.name).unlink(missing_ok=True)
        (folder / "bin" / program.name).symlink_to(program)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def one_after_the_other() -> list[str]:
        """What installs into the environment."""
        try:
            run("apt-get", "update", seconds=180)
            run("apt-get", "install", "-y", "--no-install-recommends", *SYSTEM, DEBIAN_FRONTEND="noninteractive")
        except Failed as error:
            print(f"== apt-get: {error}")
        return [name for install in (redis, mooncake, infinistore) if (name := tried(install))]

    def tried(install: Callable[[Path], None]) -> str:
        try:
            install(folder)
        except Failed as error:
            print(f"== no {install.__name__} here, its tests are skipped: {error}")
            return ""
        return install.__name__

    with ThreadPoolExecutor(3) as threads:
        apart = [threads.submit(tried, moto), threads.submit(tried, azurite)]
        found = ["valkey", "rclone", *one_after_the_other(), *(name for each in apart if (name := each.result()))]
    (folder / "needed").write_text(" ".join(found))
    print(f"== servers: {' '.join(found)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
