"""Weight updates in engines: vLLM, SGLang, verl, slime, TorchTitan."""
