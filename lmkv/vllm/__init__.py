"""The connector for vLLM. This package can be imported without vLLM; only some modules, such as `connector`, need
it.
"""
