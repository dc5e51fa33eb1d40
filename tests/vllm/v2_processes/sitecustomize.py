"""Read by Python at its start, in each process of a server that runs vLLM's V2 runner: see `child_environment`."""

from tests.vllm import triton_cpu

if triton_cpu.is_wanted():
    triton_cpu.install()
