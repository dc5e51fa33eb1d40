"""What must hit and what must miss, over a restart: another process makes the same keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from lmkv.vllm.plan.identity import request_root
from lmkv.vllm.plan.options import RequestOptions
from tests.pages import ROOT
from tests.vllm.scheduler.requests_kept_apart import NAMESPACE, REQUESTS, image, last_key, last_keys, request


def test_a_request_finds_its_own_chunk_and_no_other() -> None:
    """After a restart, too, with other hashes of strings."""
    here = last_keys()
    assert len(set(here.values())) == len(REQUESTS)
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-m", "tests.vllm.scheduler.requests_kept_apart"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": other_hashes}
    assert json.loads(subprocess.check_output(command, cwd=ROOT, env=environment)) == here


def test_an_image_further_on_does_not_mark_what_is_before_it() -> None:
    late = request(mm_features=[image("one", offset=900)])
    assert last_key(late) == last_key(REQUESTS["plain"])


def test_prompts_given_as_embeddings_are_refused() -> None:
    options = RequestOptions.of(request(prompt_embeds=object()))
    assert options.skip_save
    assert options.skip_load


def test_a_plain_request_has_the_namespaces_own_keys() -> None:
    assert request_root(NAMESPACE, REQUESTS["plain"], ()) == NAMESPACE.digest
