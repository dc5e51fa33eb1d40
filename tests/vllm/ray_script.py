"""Starts Ray and an app of it, asks the app, and writes its answers: for a network and processes of its own.

    python tests/vllm/ray_script.py ASKED ANSWERED COMMAND...

`ASKED` is a file with a list of completion requests, `ANSWERED` gets the list of the answers. The app is what
the command serves. Ends without ending Ray: who starts it does so, with all the processes around it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
LIMIT = 800.0
CLUSTER = "--head --num-cpus=8 --node-ip-address=127.0.0.1 --include-dashboard=false --object-store-memory=200000000"


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """The command, once the app answers that has a replica of each part."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    deadline = time.monotonic() + LIMIT
    # Ray gives itself 30 s, which a busy machine may take.
    while not start_ray():
        subprocess.run(["ray", "stop", "--force"], check=True)
        if time.monotonic() > deadline:
            sys.exit("Ray does not start")
    app = subprocess.Popen(command)
    while not serves():
        if app.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the app does not come up; its exit code is {app.poll()}")
        time.sleep(1.0)
    return app


def start_ray() -> bool:
    folder = tempfile.mkdtemp(prefix="lmkv-ray-", dir="/tmp")  # Ray's sockets need a short path.
    return subprocess.run(["ray", "start", *CLUSTER.split(), f"--temp-dir={folder}"], check=False).returncode == 0


def serves() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/v1/models", timeout=10) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


def ask(body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"error": error.code, "body": error.read().decode()}


def main(asked: Path, answered: Path, *command: str) -> None:
    app = start(list(command))
    answered.write_text(json.dumps([ask(body) for body in json.loads(asked.read_text())]))
    app.terminate()
    app.wait()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:])
