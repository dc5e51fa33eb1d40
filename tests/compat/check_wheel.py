"""Whether a vLLM wheel still has what `lmkv.vllm` builds on, by reading it: nothing is run or installed.

    python -m tests.compat.check_wheel vllm-0.33.0-*.whl

Compares syntax trees: the names that lmkv imports must be there, each abstract method of the connector base
must be implemented by `LMKVConnector`, what it overrides must still take the arguments it names, and whatever
else vLLM calls must be among `DEFAULTS`: read, and right for lmkv as the base has it.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
OURS = Path(__file__).resolve().parents[2] / "lmkv" / "vllm"
OWN_BASES = {"KVConnectorBase_V1", "SupportsHMA"}
DEFAULTS = {
    # The base class itself defines these; bind_kv_cache_manager calls `bind_gpu_block_pool`.
    *("role", "clear_connector_metadata", "has_connector_metadata", "bind_kv_cache_manager"),
    # Handshakes and buffers of connectors that move KV between machines.
    *("get_handshake_metadata", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"),
    *("set_host_xfer_buffer_ops", "get_mem_pool_context", "get_finished_count"),
    # Stores end before their blocks are reused, so that nothing waits for them.
    *("handle_preemptions", "finish_forward", "has_pending_block_frees", "register_finished_partial_tail"),
    # Captured graphs leave no trace in the worker.
    "reset_capture_state",
    # These belong to recurrent layers, which are not cached.
    "supports_divergent_local_hybrid_hits",
    # All groups that have prefixes.
    "get_loaded_kv_cache_group_ids",
    # Events and statistics.
    *("take_events", "get_kv_connector_kv_cache_events", "get_kv_connector_stats"),
    *("build_kv_connector_stats", "build_prom_metrics"),
}
"""Methods of the connector base that need no answer of lmkv's."""

FIELDS = {
    "vllm/v1/core/sched/output.py": {
        "SchedulerOutput": {
            "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens", "kv_connector_block_state",
        },
        "NewRequestData": {"req_id", "num_computed_tokens"}, "CachedRequestData": {"req_ids", "num_computed_tokens"},
        "KVConnectorBlockState": {"get_block_ids"},
    },
    "vllm/v1/outputs.py": {"KVConnectorOutput": {"kv_connector_worker_meta"}},
    "vllm/v1/kv_cache_interface.py": {"KVCacheConfig": {"num_blocks", "kv_cache_groups", "kv_cache_layout"}},
    "vllm/config/kv_transfer.py": {"KVTransferConfig": {"kv_load_failure_policy", "kv_connector_extra_config"}},
}  # fmt: skip

Classes = Mapping[str, ast.ClassDef]


def classes(source: str) -> Classes:
    return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Methods and annotated fields by name."""
    found: dict[str, ast.stmt] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            found[item.name] = item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = item
    return found


def is_abstract(item: ast.stmt) -> bool:
    return isinstance(item, ast.FunctionDef) and any(
        isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in item.decorator_list
    )


def positional(item: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*item.args.posonlyargs, *item.args.args)]


def problems(wheel: zipfile.ZipFile) -> Iterator[str]:
    names = set(wheel.namelist())
    yield from _missing_imports(wheel, names)
    if BASE in names:
        yield from _connector_problems(classes(wheel.read(BASE).decode()))
    for path, wanted in FIELDS.items():
        known = classes(wheel.read(path).decode()) if path in names else {}
        for name, fields in wanted.items():
            missing = fields - set(members(known[name])) if name in known else fields
            if missing:
                yield f"{path}: {name} lacks {', '.join(sorted(missing))}"


def _missing_imports(wheel: zipfile.ZipFile, names: set[str]) -> Iterator[str]:
    for ours in sorted(OURS.glob("*.py")):
        for node in ast.walk(ast.parse(ours.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                path = node.module.replace(".", "/")  # type: ignore[union-attr]
                file = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in names), None)
                text = wheel.read(file).decode() if file else ""
                for alias in node.names:
                    if alias.name not in text:
                        yield f"{ours.name}: {node.module} has no {alias.name}"


def _connector_problems(theirs: Classes) -> Iterator[str]:
    mine = members(classes((OURS / "connector.py").read_text())["LMKVConnector"])
    for base in sorted(OWN_BASES & set(theirs)):
        for name, item in members(theirs[base]).items():
            if is_abstract(item) and name not in mine:
                yield f"{base}.{name} is abstract and not implemented"
            if name not in mine and name not in DEFAULTS and not name.startswith("_"):
                yield f"{base}.{name} is new: override it, or name it in DEFAULTS"
            override = mine.get(name)
            if not isinstance(item, ast.FunctionDef) or not isinstance(override, ast.FunctionDef):
                continue
            if name != "__init__" and positional(item) != positional(override):
                yield f"{base}.{name} takes {positional(item)}, ours {positional(override)}"


def main(argv: list[str]) -> int:
    found = 0
    for path in argv:
        with zipfile.ZipFile(path) as wheel:
            for problem in problems(wheel):
                found += 1
                print(f"{Path(path).name}: {problem}")
        print(f"{Path(path).name}: {'problems found' if found else 'fits'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
