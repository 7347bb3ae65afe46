"""Dispatch and combine in engines: vLLM, SGLang, Megatron."""
