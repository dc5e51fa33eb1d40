"""What must hit and what must miss, over a restart: this process stores, another one looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv.vllm.plan.identity import request_root
from lmkv.vllm.plan.options import RequestOptions
from tests.vllm.scheduler.requests_kept_apart import NAMESPACE, REQUESTS, image, last_key, request, store_all

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Whose chunk each request finds after a restart, with other hashes of strings."""
    folder = tmp_path_factory.mktemp("disk")
    store_all(folder)
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.scheduler.requests_kept_apart", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": other_hashes},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_finds_its_own_chunk_and_no_other(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == [name]


def test_an_image_further_on_does_not_mark_what_is_before_it() -> None:
    late = request(mm_features=[image("one", offset=900)])
    assert last_key(late) == last_key(REQUESTS["plain"])


def test_prompts_given_as_embeddings_are_refused() -> None:
    options = RequestOptions.of(request(prompt_embeds=object()))
    assert options.skip_save
    assert options.skip_load


def test_a_plain_request_has_the_namespaces_own_keys() -> None:
    assert request_root(NAMESPACE, REQUESTS["plain"], ()) == NAMESPACE.digest
