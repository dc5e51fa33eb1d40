"""Imports what takes long, in the process that trials are copies of. It starts no thread and touches no device."""

from __future__ import annotations

import transformers  # noqa: F401
from vllm import EngineArgs, SamplingParams  # noqa: F401
from vllm.lora.request import LoRARequest  # noqa: F401
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

from lmkv.testing.torture import trial  # noqa: F401
