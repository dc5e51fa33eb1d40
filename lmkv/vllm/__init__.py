"""The connector for vLLM. Programs can import this package without vLLM; only some of its modules, such as
`connector`, need vLLM.
"""
