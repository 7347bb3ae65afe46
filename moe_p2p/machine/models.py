"""Sizes of public models' expert layers: the one table of compile, plan, model, bench and weights.

From the models' published configurations: config.json on Hugging Face, or an engine's file of it
where a line says so.
"""

from __future__ import annotations

from typing import NamedTuple


class MoeSizes(NamedTuple):
    """hidden: of the rows that travel, which may be narrower than the model's."""

    hidden: int  # H
    experts: int  # E, routed
    topk: int  # K
    inner: int  # width of an expert


MODELS = {
    "deepseek-v3": MoeSizes(7168, 256, 8, 2048),
    "deepseek-v4-pro": MoeSizes(7168, 384, 6, 3072),  # vLLM, pull request 49636
    "deepseek-v4-flash": MoeSizes(4096, 256, 6, 2048),
    "kimi-k2": MoeSizes(7168, 384, 8, 2048),
    # Experts are behind a projection from 7168 (routed_expert_hidden_size).
    "kimi-k3": MoeSizes(3584, 896, 16, 3072),
    "glm-5": MoeSizes(6144, 256, 8, 2048),  # transformers, defaults of GlmMoeDsaConfig
    "qwen3-235b-a22b": MoeSizes(4096, 128, 8, 1536),
    "qwen3-30b-a3b": MoeSizes(2048, 128, 8, 768),
    "gpt-oss-120b": MoeSizes(2880, 128, 4, 2880),
}
