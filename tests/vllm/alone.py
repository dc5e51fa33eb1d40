"""Answers of vLLM without a connector: computed once for a version, a processor, a model and options, and kept.

They are kept with pytest's cache, `--cache-clear` forgets them. A change to the module that asks, or to the engine of
the tests, makes them be computed again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tests.vllm import harness, mamba_cpu, triton_cpu
from tests.vllm.harness import Engine, engine

T = TypeVar("T")


class Alone:
    """Asks engines without a connector, or remembers what they have answered. `folder`: of what is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(
        self,
        model: Path,
        options: dict[str, Any],
        ask: Callable[[Engine], T],
        name: str = "",
        *,
        vllm: Callable[[], AbstractContextManager[Any]] = nullcontext,
        anew: bool = False,
    ) -> T:
        """What `ask` returns, in pickle's words. `name`: tells apart the calls of a module. `vllm`: around the engine.

        `anew`: compute it in any case, and fail if something else was remembered: the control of all that is kept.
        """
        place = self._folder / self._key(model, options, ask, name)
        known = pickle.loads(place.read_bytes()) if place.exists() else None
        if known is not None and not anew:
            return known[0]  # type: ignore[no-any-return]
        with vllm(), engine(model, connector=None, **options) as plain:
            found = ask(plain)
        assert known in (None, (found,)), f"vLLM alone answers otherwise than it did: {name or ask.__qualname__}"
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps((found,)))
        unfinished.rename(place)
        return found

    @staticmethod
    def _key(model: Path, options: dict[str, Any], ask: Callable[[Engine], Any], name: str) -> str:
        import torch

        from lmkv.vllm.compat import vllm_version

        digest = hashlib.sha256(
            f"{vllm_version()} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode()
        )
        digest.update(f"{triton_cpu.is_wanted()} {sorted(options.items())} {name} {ask.__qualname__}".encode())
        sources = [inspect.getfile(each) for each in (ask, harness, mamba_cpu)]
        for path in [*map(Path, sources), *sorted(path for path in model.rglob("*") if path.is_file())]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()
