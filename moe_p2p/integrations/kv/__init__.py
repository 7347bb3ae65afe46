"""KV pages between engines: connectors of vLLM and SGLang."""
