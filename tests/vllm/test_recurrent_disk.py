"""Chunks and states of models with recurrent layers on a disk: through little host memory, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkv.chunks.hashing import state_keys
from tests.vllm.answers import answers_of, ask, off, slot_bytes
from tests.vllm.families import RECURRENT
from tests.vllm.harness import engine, external_hits, over_disk, prompt
from tests.vllm.test_families import LONGEST, TIGHT


@pytest.mark.parametrize("name", RECURRENT)
def test_what_a_disk_keeps_serves_the_next_engine(name: str, tmp_path: Path) -> None:
    """The second engine's host memory has too few slots, so that its load is streamed. Damaged states are a miss."""
    family, ids = RECURRENT[name], prompt(LONGEST, LONGEST)
    folder = family.write(tmp_path / "model")
    options: dict[str, Any] = {**TIGHT, "num_gpu_blocks_override": family.blocks, **family.options}
    whole = (LONGEST - 1) // family.unit * family.unit
    extra: dict[str, Any] = {"load_or_recompute": False}
    hits = []
    with family.vllm():
        with engine(folder, connector=None, **options) as plain:
            expected, slot = answers_of(ask(plain, [ids])), slot_bytes(plain)
        # With few slots a store may find its chunk evicted before a slow disk has written it.
        for slots in (100, 30, 100):
            extra["max_local_cpu_size"] = slots * slot / 2**30
            with over_disk(folder, tmp_path / "disk", extra=extra, **options) as running:
                output = ask(running, [ids])[0]
                assert off([output], expected) < family.noise
                hits.append(external_hits(output))
                running.assert_nothing_leaked()
                keys = running.connector.sides.scheduler.keys_of(ids, None, {})
                states = running.connector.sides.model.block_map.states
        assert hits == [0, whole, whole]
        for key in keys:
            for damaged in (tmp_path / "disk").rglob(f"*{state_keys(key, states)[0].hex()[4:]}*"):
                damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
                hits.append(-1)
        assert hits[3:], "no state was found on the disk"
        with over_disk(folder, tmp_path / "disk", extra=extra, **options) as running:
            output = ask(running, [ids])[0]
            assert off([output], expected) < family.noise
            running.assert_nothing_leaked()
