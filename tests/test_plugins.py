"""Backends and policies of other packages, by entry points and by `package.module:Class`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkv import plugins
from lmkv.backends.remote.base import RemoteOptions
from lmkv.build import build_store
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.cli.app import app
from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.policies import make_admission, make_policy
from lmkv.protocols import Chunk, ReadStatus
from lmkv.testing.backend_suite import BackendSuite
from tests.kit import LIMIT, chain, raised
from tests.pages import extracted

NAMESPACE = Namespace(model="m", dtype="u8", chunk_size=16, block_size=16)
LAYOUT = KVLayout(16, (LayerPages(4096, 1),))

OTHERS = """
import collections

from lmkv.policies import LRU

class MRU(LRU):
    pass

class NoPolicy:
    pass

class Rejects:
    def admit(self, key):
        return False

def breaks(*args, **options):
    raise RuntimeError(f"no such host: {args[0]}")
"""


def install(folder: Path, package: Path) -> None:
    """As pip does, without an index."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--target", str(folder), str(package)], check=True, capture_output=True, timeout=LIMIT * 5
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's package, and one with a policy and with what cannot be used, as pip installs them."""
    pytest.importorskip("setuptools")
    site, guide, others = (tmp_path_factory.mktemp(name) for name in ("site", "guide", "others"))
    extracted("write-a-backend.md", guide)
    for name in ("sqlite_backend.py", "test_sqlite_backend.py", "use_it.py"):
        (guide / name).unlink()
    install(site, guide)
    (others / "others.py").write_text(OTHERS)
    (others / "pyproject.toml").write_text(
        '[project]\nname = "others"\nversion = "1"\n[tool.setuptools]\npy-modules = ["others"]\n'
        '[project.entry-points."lmkv.policies"]\nMRU = "others:MRU"\nGONE = "others:Gone"\n'
        '[project.entry-points."lmkv.backends"]\nbroken = "others:breaks"\nnowhere = "not_there:Class"\n'
    )
    install(site, others)
    return site


@pytest.fixture(autouse=True)
def visible(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in ("others", "sqlite_store"):
        sys.modules.pop(name, None)


class TestStore(BackendSuite):
    def make(self, folder: Path) -> Any:
        from sqlite_store import SQLiteStore  # type: ignore[import-not-found]

        url = f"sqlite://{folder / 'kv.sqlite'}"
        return SQLiteStore(url, bytes(32), RemoteOptions(timeout=5.0))


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite_store:SQLiteStore"])
def test_a_store_of_a_configuration(scheme: str, tmp_path: Path) -> None:
    config = Config.load(extra={"remote_url": f"{scheme}://{tmp_path / 'kv.sqlite'}", "max_local_cpu_size": 0.01})
    keys = chain("a", 3)
    with_key = Config.load(extra={"remote_url": str(config.remote_url[0]), "authentication_key": "k" * 32})
    for engine in range(2):
        store = build_store(config, NAMESPACE, LAYOUT)
        try:
            assert store.stats().tiers[1].name in ("sqlite", "sqlitestore")
            if engine == 0:
                with store.reserve(keys) as reservation:
                    for slot in reservation.slots.values():
                        store.slab.view(slot)[:5] = b"hello"
                    reservation.commit()
                assert store.drain(LIMIT)
            else:
                found = store.look_up_shared(keys)
                assert found is not None
                assert found.wait(LIMIT)
                promotion = store.promote(keys)
                assert promotion.wait(LIMIT)
                with store.lease(keys) as lease:
                    assert [bytes(store.slab.view(slot)[:5]) for slot in lease.slots] == [b"hello"] * 3
                promotion.release()
        finally:
            store.close()
    assert with_key.remote_url == config.remote_url


def test_another_key_or_a_flipped_bit_is_not_served(tmp_path: Path) -> None:
    import sqlite3

    from sqlite_store import SQLiteStore

    path = tmp_path / "kv.sqlite"
    common: dict[str, Any] = {"timeout": 5.0, "prefix": ""}
    key, into = chain("a", 1)[0], memoryview(bytearray(7))
    plain = SQLiteStore(f"sqlite://{path}", bytes(32), RemoteOptions(**common))
    keyed = SQLiteStore(f"sqlite://{path}", bytes(32), RemoteOptions(**common, authentication_key=b"k" * 32))
    plain.write(Chunk(key, memoryview(b"payload")))
    assert plain.read(key, into).status is ReadStatus.HIT
    assert keyed.read(key, into).status is ReadStatus.FAILED
    with sqlite3.connect(path) as db:
        [(value,)] = db.execute("select value from chunks").fetchall()
        db.execute("update chunks set value = ?", (value[:-1] + bytes([value[-1] ^ 1]),))
    db.close()
    assert plain.read(key, into).status is ReadStatus.FAILED
    plain.close()
    keyed.close()


def test_a_policy_and_an_admission_of_a_configuration() -> None:
    for name in ("MRU", "mru", "others:MRU"):
        policy = make_policy(Config.load(extra={"cache_policy": name}).cache_policy)
        assert type(policy).__name__ == "MRU"
    assert not make_admission(Config.load(extra={"disk_admission": "others:Rejects"}).disk_admission).admit(bytes(32))


def test_what_cannot_be_used_is_named() -> None:
    raised(ConfigError, "others:Gone", make_policy, "GONE")
    raised(ConfigError, "lmkv.protocols.Policy", make_policy, "others:NoPolicy")
    raised(ConfigError, "not_there:Class", make_policy, "not_there:Class")
    raised(ConfigError, "lmkv.protocols.Admission", make_admission, "others:NoPolicy")
    for extra in ({"cache_policy": "SIEVED"}, {"remote_url": "ftp://host"}):
        raised(ConfigError, "package.module:Class", Config.load, extra=extra)


@pytest.mark.parametrize("scheme", ["broken", "nowhere", "others:breaks", "others:NoPolicy"])
def test_a_store_that_cannot_be_made_is_named_and_its_password_is_not(scheme: str) -> None:
    config = Config.load(extra={"remote_url": f"{scheme}://me:secret@host/", "max_local_cpu_size": 0.01})
    with pytest.raises(ConfigError, match=scheme) as caught:
        build_store(config, NAMESPACE, LAYOUT)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None or "secret" not in str(caught.value.__cause__)


@pytest.mark.slow("lmkv doctor imports vLLM")
def test_doctor_lists_them_and_says_which_cannot_be_loaded() -> None:
    printed = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output
    assert "sqlite://" in printed
    assert "sqlite_store:SQLiteStore" in printed
    assert "Will not work: the policy 'GONE' in the entry points lmkv.policies: others:Gone cannot be loaded" in printed


def test_names_of_our_own_stay_ours() -> None:
    assert plugins.installed(plugins.BACKENDS)["sqlite"] == "sqlite_store:SQLiteStore"
    assert (
        Config.load(extra={"remote_url": "redis://host"}).remote_url[0].place == "lmkv.backends.remote.redis:open_url"
    )
