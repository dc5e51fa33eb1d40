"""`lmkv demo` asks a remote store before it starts vLLM, which takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from lmkv.cli.demo import answering
from lmkv.errors import UsageError
from tests.servers import free_port, needs_package, object_server, redis_server
from tests.tables import raised

STARTED = "starting vLLM"


def demo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("LMKV_", "LMCACHE_", "AWS_"))}
    command = [Path(sys.executable).with_name("lmkv"), "demo", *arguments]
    return subprocess.run(command, env={**mine, **env}, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("redis://:hunter2@127.0.0.1:{port}", "redis"),
        ("valkey://127.0.0.1:{port}", "redis"),
        ("s3://name:hunter2@lmkv?endpoint=http://127.0.0.1:{port}&region=us-east-1", "obstore"),
        ("mooncake://127.0.0.1:{port}", "mooncake"),
        ("infinistore://127.0.0.1:{port}", "attrs"),
    ],
)
def test_a_store_that_is_not_there_is_said_before_vllm_starts(url: str, package: str) -> None:
    needs_package("vllm", "see docs/vllm.md")
    needs_package(package, "see docs/remote.md")
    done = demo("--tier", "remote", "--url", url.format(port=free_port()))
    assert done.returncode == 1
    assert " fail: " in done.stderr
    assert STARTED not in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_without_the_bucket_is_refused(tmp_path: Path) -> None:
    needs_package("obstore", "see docs/remote.md")
    with object_server("rclone", tmp_path) as server:
        url = server.url("demo").replace("://", f"://{server.USER}:{quote(server.SECRET)}@", 1)
        answering(url)
        assert not [path for path in server.bucket.rglob("*") if path.is_file()], "it is left as it was"
        raised(UsageError, r"(?i)bucket", lambda: answering(url.replace("bucket/", "no-such-bucket/")))
        raised(UsageError, "PermissionDenied", lambda: answering(url.replace(quote(server.SECRET), "wrong")))


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_server_that_works_is_left_as_it_was(tmp_path: Path, kind: str) -> None:
    with redis_server(kind, tmp_path) as server:
        answering(server.url)
        import redis

        with redis.Redis(port=server.port) as client:
            assert client.dbsize() == 0


def test_a_remote_store_needs_its_address() -> None:
    done = demo("--tier", "remote")
    assert (done.returncode, "give the URL of the store" in done.stderr) == (2, True)
