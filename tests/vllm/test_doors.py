"""A backend and a policy of other packages under vLLM: the guide's, installed as pip does, with outputs equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import extracted
from tests.test_plugins import install
from tests.vllm.harness import engine, external_hits, generated, prompt


def test_the_guides_store_serves_hits(
    model: Path, expected: dict[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one engine has stored another one loads; with another key it finds nothing."""
    pytest.importorskip("setuptools")
    site, guide = tmp_path / "site", tmp_path / "guide"
    guide.mkdir()
    extracted("write-a-backend.md", guide)
    for name in ("sqlite_backend.py", "test_sqlite_backend.py", "use_it.py"):
        (guide / name).unlink()
    extracted("policies.md", guide)
    install(site, guide)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(guide))
    extra = {
        "remote_url": f"sqlite://{tmp_path / 'kv.sqlite'}",
        "cache_policy": "own_policy:Shallow",
        "load_or_recompute": False,
    }
    options = {"max_num_batched_tokens": 480}
    with engine(model, extra=extra, **options) as first:
        assert type(first.store.policies[0]).__name__ == "Shallow"
        assert first.ids([prompt(0, 1500)]) == [expected[0]]
        assert first.store.drain(60)
        assert first.store.stats().tiers[1].name == "sqlite"
    with engine(model, extra=extra, **options) as second:
        [output] = second.run([prompt(0, 1500)])
        assert generated([output]) == [expected[0]]
        assert external_hits(output) >= 1280
        assert output.kv_transfer_params["lmkv"]["sources"]["sqlite"] >= 1280
        second.assert_nothing_leaked()
    with engine(model, extra={**extra, "authentication_key": "k" * 32}, **options) as stranger:
        [output] = stranger.run([prompt(0, 1500)])
        assert generated([output]) == [expected[0]]
        assert external_hits(output) == 0
