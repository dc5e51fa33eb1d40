"""The connector for vLLM. Only some modules of this package, such as `connector`, need vLLM to be installed."""
