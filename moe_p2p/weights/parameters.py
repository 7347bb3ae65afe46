"""Parameters of public models: names and shapes of checkpoints, and how engine ranks fuse them.

Sizes are those of config.json on Hugging Face, or of the engine's file that a line names. Fused
tensors are vLLM's: qkv_proj, gate_up_proj, w13 and w2, and what a family adds. `Model.left_out`
names what is not described.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from moe_p2p.machine.models import MODELS as SIZES

BF16, F32 = "bfloat16", "float32"


class Weight(NamedTuple):
    """A parameter. split: the dimension that tensor parallelism cuts, None: each rank has it.

    fused: the engine rank's tensor, and which of its parts this is, 0 from the top. expert: its
    number. groups: most ranks that the dimension is cut among (KV heads); others have the same.
    quantized: engines may hold it in fp8; dtype: what it has otherwise.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    fused: tuple[str, int] = ("", 0)
    expert: int | None = None
    groups: int = 1 << 30
    quantized: bool = True
    layer: int = 0
    dtype: str = BF16


def _linear(name: str, rows: int, columns: int, split: int | None = None,
            into: tuple[str, int] = ("", 0), **more: Any) -> Weight:  # fmt: skip
    fused = (f"{into[0]}.weight", into[1]) if into[0] else into
    return Weight(f"{name}.weight", (rows, columns), split, fused, **more)


def _kept(name: str, *shape: int, split: int | None = None, dtype: str = BF16,
          into: tuple[str, int] = ("", 0)) -> Weight:  # fmt: skip
    """A parameter that engines do not quantize; its whole name."""
    return Weight(name, shape, split, into, quantized=False, dtype=dtype)


def _norms(at: str, **sizes: int) -> list[Weight]:
    return [_kept(f"{at}{name}.weight", size) for name, size in sizes.items()]


def _gated(at: str, hidden: int, inner: int, names: tuple[str, str, str],
           expert: int | None = None) -> Iterator[Weight]:  # fmt: skip
    """names: of gate, up and down."""
    if expert is None:
        into, down = f"{at}.gate_up_proj", f"{at}.down_proj"
    else:
        into, down = f"{at}.w13", f"{at}.w2"
        at = f"{at}.{expert}"
    yield _linear(f"{at}.{names[0]}", inner, hidden, 0, (into, 0), expert=expert)
    yield _linear(f"{at}.{names[1]}", inner, hidden, 0, (into, 1), expert=expert)
    yield _linear(f"{at}.{names[2]}", hidden, inner, 1, (down, 0), expert=expert)


PROJ = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Attention with KV heads."""

    heads: int
    kv_heads: int
    head_dim: int = 128

    def weights(self, at: str, hidden: int) -> list[Weight]:
        dim, into = self.head_dim, f"{at}.qkv_proj"
        rows = self.kv_heads * dim
        return [
            _linear(f"{at}.q_proj", self.heads * dim, hidden, 0, (into, 0)),
            *(_linear(f"{at}.{n}_proj", rows, hidden, 0, (into, i), groups=self.kv_heads)
              for i, n in enumerate("kv", 1)),
            _linear(f"{at}.o_proj", hidden, self.heads * dim, 1),
            *_norms(f"{at}.", q_norm=dim, k_norm=dim),
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Latent:
    """MLA. nope, value: widths of a head's K without rope, and of V. index_heads: of an indexer
    (sparse attention) that each rank has whole, 0: none. gated: the output has a gate."""

    heads: int
    q_lora: int = 1536
    kv_lora: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    index_heads: int = 0
    index_dim: int = 128
    gated: bool = False

    def weights(self, at: str, hidden: int) -> list[Weight]:
        into, rows = f"{at}.fused_qkv_a_proj", self.kv_lora + self.rope
        heads = self.heads
        found = [
            _linear(f"{at}.q_a_proj", self.q_lora, hidden, None, (into, 0)),
            _linear(f"{at}.kv_a_proj_with_mqa", rows, hidden, None, (into, 1)),
            _linear(f"{at}.q_b_proj", heads * (self.nope + self.rope), self.q_lora, 0),
            _linear(f"{at}.kv_b_proj", heads * (self.nope + self.value), self.kv_lora, 0),
            _linear(f"{at}.o_proj", hidden, heads * self.value, 1),
            *_norms(f"{at}.", q_a_layernorm=self.q_lora, kv_a_layernorm=self.kv_lora),
        ]
        if self.gated:
            found.append(_linear(f"{at}.g_proj", heads * self.value, hidden, 0))
        return found + (self._indexer(f"{at}.indexer", hidden) if self.index_heads else [])

    def _indexer(self, at: str, hidden: int) -> list[Weight]:
        into = f"{at}.wk_weights_proj.weight"
        return [
            _linear(f"{at}.wq_b", self.index_heads * self.index_dim, self.q_lora),
            _kept(f"{at}.wk.weight", self.index_dim, hidden, into=(into, 0)),
            _kept(f"{at}.weights_proj.weight", self.index_heads, hidden, into=(into, 1)),
            _kept(f"{at}.k_norm.weight", self.index_dim),
            _kept(f"{at}.k_norm.bias", self.index_dim),
        ]


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """DeepSeek-V4's: one KV head, its cache compressed by `ratio` tokens; the output in `groups` of
    heads. ratio 4: with overlap, and an indexer; 128: without; 0: a window alone."""

    heads: int
    q_lora: int
    groups: int
    head_dim: int = 512
    o_lora: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    ratio: int = 0

    def weights(self, at: str, hidden: int) -> list[Weight]:
        width, into = self.heads * self.head_dim, f"{at}.fused_wqa_wkv"
        inner = self.groups * self.o_lora
        found = [
            _linear(f"{at}.wq_a", self.q_lora, hidden, None, (into, 0)),
            _linear(f"{at}.wkv", self.head_dim, hidden, None, (into, 1)),
            _linear(f"{at}.wq_b", width, self.q_lora, 0),
            _linear(f"{at}.wo_a", inner, width // self.groups, 0),
            _linear(f"{at}.wo_b", hidden, inner, 1),
            _kept(f"{at}.attn_sink", self.heads, split=0, dtype=F32),
            *_norms(f"{at}.", q_norm=self.q_lora, kv_norm=self.head_dim),
        ]
        if self.ratio:
            found += _compressor(f"{at}.compressor", hidden, self.head_dim, self.ratio)
        if self.ratio == 4:
            rows, indexer = self.index_heads * self.index_dim, f"{at}.indexer"
            found += [
                _linear(f"{indexer}.wq_b", rows, self.q_lora),
                _kept(f"{indexer}.weights_proj.weight", self.index_heads, hidden),
                *_compressor(f"{indexer}.compressor", hidden, self.index_dim, 4),
            ]
        return found


def _compressor(at: str, hidden: int, dim: int, ratio: int) -> list[Weight]:
    rows, into = dim * (2 if ratio == 4 else 1), f"{at}.fused_wkv_wgate.weight"
    return [
        _kept(f"{at}.ape", ratio, rows, dtype=F32),
        _kept(f"{at}.wkv.weight", rows, hidden, into=(into, 0)),
        _kept(f"{at}.wgate.weight", rows, hidden, into=(into, 1)),
        *_norms(f"{at}.", norm=dim),
    ]


class Attention(Protocol):
    def weights(self, at: str, hidden: int) -> list[Weight]:
        """Parameters of a layer's attention, named from `at` on."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with experts in most layers: Qwen3, DeepSeek-V3, Kimi-K2, GLM-5; a base of others.

    inner: of dense layers. shared: how many experts each token takes besides. latent: width of the
    rows that routed experts take, 0: hidden. bias: the router has one for each expert.
    """

    hidden: int
    layers: int
    experts: int
    expert_inner: int
    vocab: int
    attention: Attention
    dense_layers: int = 0
    inner: int = 0
    shared: int = 0
    latent: int = 0
    bias: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def expert_hidden(self) -> int:
        return self.latent or self.hidden

    def before(self) -> list[Weight]:
        return [_kept("model.embed_tokens.weight", self.vocab, self.hidden, split=0)]

    def after(self) -> list[Weight]:
        head = _kept("lm_head.weight", self.vocab, self.hidden, split=0)
        return [*_norms("model.", norm=self.hidden), head]

    def layer(self, layer: int) -> Iterator[Weight]:
        at = f"model.layers.{layer}"
        yield from self.attention.weights(f"{at}.self_attn", self.hidden)
        both = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), self.hidden)
        yield from _norms(f"{at}.", **both)
        if layer < self.dense_layers:
            yield from _gated(f"{at}.mlp", self.hidden, self.inner, PROJ)
        else:
            yield from self._experts(f"{at}.mlp", PROJ, PROJ)

    def _experts(self, at: str, names: tuple[str, str, str], shared: tuple[str, str, str],
                 bias: str = "e_score_correction_bias") -> Iterator[Weight]:  # fmt: skip
        yield _kept(f"{at}.gate.weight", self.experts, self.hidden)
        if self.bias:
            yield _kept(f"{at}.gate.{bias}", self.experts, dtype=F32)
        if self.shared:
            inner = self.shared * self.expert_inner
            yield from _gated(f"{at}.shared_experts", self.hidden, inner, shared)
        for e in range(self.experts):
            yield from _gated(f"{at}.experts", self.expert_hidden, self.expert_inner, names, e)


@dataclass(frozen=True, kw_only=True)
class DeepSeekV4(Model):
    """ratios: of the first two layers; then 4 and 128 take turns. streams: of hyper-connections.
    hashed: first layers, whose routers have a frozen table instead of a bias."""

    attention: Compressed
    ratios: tuple[int, int]
    streams: int = 4
    hashed: int = 3

    def before(self) -> list[Weight]:
        return [_kept("embed.weight", self.vocab, self.hidden, split=0)]

    def after(self) -> list[Weight]:
        head = _kept("head.weight", self.vocab, self.hidden, split=0)
        mixed = self._mixed("hc_head", self.streams, 1)
        return [*mixed, *_norms("", norm=self.hidden), head]

    def layer(self, layer: int) -> Iterator[Weight]:
        at = f"layers.{layer}"
        ratio = self.ratios[layer] if layer < 2 else (4, 128)[layer % 2]
        attention = dataclasses.replace(self.attention, ratio=ratio)
        yield from attention.weights(f"{at}.attn", self.hidden)
        yield from _norms(f"{at}.", attn_norm=self.hidden, ffn_norm=self.hidden)
        for part in ("attn", "ffn"):
            yield from self._mixed(f"{at}.hc_{part}", (2 + self.streams) * self.streams, 3)
        for each in self._experts(f"{at}.ffn", NUMBERED, NUMBERED, "bias"):
            if layer >= self.hashed or not each.name.endswith(".gate.bias"):
                yield each

    def _mixed(self, at: str, rows: int, scales: int) -> list[Weight]:
        shapes = {"fn": (rows, self.streams * self.hidden), "base": (rows,), "scale": (scales,)}
        return [_kept(f"{at}_{n}", *shape, dtype=F32) for n, shape in shapes.items()]


@dataclass(frozen=True, kw_only=True)
class KimiK3(Model):
    """Three layers of linear attention (KDA), then one of gated MLA; experts behind projections.

    Its published checkpoint quantizes routed experts alone.
    """

    delta_heads: int = 96
    delta_dim: int = 128
    taps: int = 4  # of short convolutions
    attention: Latent = Latent(heads=96, gated=True)

    def before(self) -> list[Weight]:
        return _under("language_model.", super().before())

    def after(self) -> list[Weight]:
        found = [
            *_norms("model.", output_attn_res_norm=self.hidden),
            _kept("model.output_attn_res_proj.weight", 1, self.hidden),
        ]
        return _under("language_model.", [*super().after(), *found])

    def layer(self, layer: int) -> Iterator[Weight]:
        yield from _under("language_model.", self._layer(layer))

    def _layer(self, layer: int) -> list[Weight]:
        at, hidden = f"model.layers.{layer}", self.hidden
        full = layer % 4 == 3 or layer == 92
        mixing = self.attention.weights if full else self._delta
        found = [each._replace(quantized=False) for each in mixing(f"{at}.self_attn", hidden)]
        norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm",
                 "mlp_res_norm")  # fmt: skip
        found += _norms(f"{at}.", **dict.fromkeys(norms, hidden))
        for part in ("self_attention", "mlp"):
            found.append(_kept(f"{at}.{part}_res_proj.weight", 1, hidden))
        if layer < self.dense_layers:
            inner = _gated(f"{at}.mlp", hidden, self.inner, PROJ)
            return [*found, *(each._replace(quantized=False) for each in inner)]
        at = f"{at}.block_sparse_moe"
        found += [
            _kept(f"{at}.routed_expert_down_proj.weight", self.latent, hidden),
            *_norms(f"{at}.", routed_expert_norm=self.latent),
            _kept(f"{at}.routed_expert_up_proj.weight", hidden, self.latent),
        ]
        for each in self._experts(at, NUMBERED, PROJ):
            found.append(each._replace(quantized=each.expert is not None))
        return found

    def _delta(self, at: str, hidden: int) -> list[Weight]:
        heads, width = self.delta_heads, self.delta_heads * self.delta_dim
        into, conv = f"{at}.in_proj_qkvgfab", f"{at}.conv1d.weight"
        return [
            *(_linear(f"{at}.{n}_proj", width, hidden, 0, (into, i)) for i, n in enumerate("qkvg")),
            _linear(f"{at}.f_a_proj", self.delta_dim, hidden, None, (into, 4)),
            _linear(f"{at}.b_proj", heads, hidden, 0, (into, 5)),
            _linear(f"{at}.f_b_proj", width, self.delta_dim, 0),
            *(_kept(f"{at}.{n}_conv1d.weight", width, 1, self.taps, split=0, dtype=F32,
                    into=(conv, i)) for i, n in enumerate("qkv")),
            _kept(f"{at}.A_log", heads, split=0, dtype=F32),
            _kept(f"{at}.dt_bias", width, split=0, dtype=F32),
            *_norms(f"{at}.", o_norm=self.delta_dim),
            _linear(f"{at}.o_proj", hidden, width, 1),
        ]  # fmt: skip


def _under(prefix: str, weights: list[Weight]) -> list[Weight]:
    return [
        each._replace(name=prefix + each.name, fused=(each.fused[0] and prefix + each.fused[0],
                                                     each.fused[1]))
        for each in weights
    ]  # fmt: skip


@functools.cache
def weights(model: Model) -> tuple[Weight, ...]:
    """All parameters, in the order of layers."""
    found = model.before()
    for layer in range(model.layers):
        found += [each._replace(layer=layer) for each in model.layer(layer)]
    return (*found, *(each._replace(layer=model.layers - 1) for each in model.after()))


def _sizes(name: str) -> dict[str, Any]:
    sizes = SIZES[name]
    return {"experts": sizes.experts, "expert_inner": sizes.inner, "hidden": sizes.hidden}


PREDICTION = "layers for multi-token prediction"
FOUR_BITS = "experts in 4 bits, as published (planned in the type of --dtype)"
_V4 = (PREDICTION, "frozen tables of hash routing", FOUR_BITS)

MODELS: dict[str, Model] = {
    "qwen3-30b-a3b": Model(
        **_sizes("qwen3-30b-a3b"),
        layers=48,
        vocab=151936,
        attention=Grouped(heads=32, kv_heads=4),
    ),
    "qwen3-235b-a22b": Model(
        **_sizes("qwen3-235b-a22b"),
        layers=94,
        vocab=151936,
        attention=Grouped(heads=64, kv_heads=4),
    ),
    "deepseek-v3": Model(
        **_sizes("deepseek-v3"),
        layers=61,
        dense_layers=3,
        inner=18432,
        shared=1,
        bias=True,
        vocab=129280,
        attention=Latent(heads=128),
        left_out=(PREDICTION,),
    ),
    # vLLM's models/deepseek_v4; transformers' DeepseekV4Config has the sizes of Flash.
    "deepseek-v4-pro": DeepSeekV4(
        **_sizes("deepseek-v4-pro"),
        layers=61,
        shared=1,
        bias=True,
        vocab=129280,
        attention=Compressed(heads=128, q_lora=1536, groups=16),
        ratios=(128, 128),
        left_out=_V4,
    ),
    "deepseek-v4-flash": DeepSeekV4(
        **_sizes("deepseek-v4-flash"),
        layers=43,
        shared=1,
        bias=True,
        vocab=129280,
        attention=Compressed(heads=64, q_lora=1024, groups=8),
        ratios=(0, 0),
        left_out=_V4,
    ),
    "kimi-k2": Model(
        **_sizes("kimi-k2"),
        layers=61,
        dense_layers=1,
        inner=18432,
        shared=1,
        bias=True,
        vocab=163840,
        attention=Latent(heads=64),
    ),
    # vLLM's models/kimi_k3. The rows of SIZES are those of routed experts.
    "kimi-k3": KimiK3(
        **(_sizes("kimi-k3") | {"hidden": 7168}),
        latent=SIZES["kimi-k3"].hidden,
        layers=93,
        dense_layers=1,
        inner=33792,
        shared=2,
        bias=True,
        vocab=163840,
        left_out=("the vision tower", FOUR_BITS),
    ),
    # transformers' defaults of GlmMoeDsaConfig: each layer has an indexer. Its config.json itself
    # was not found.
    "glm-5": Model(
        **_sizes("glm-5"),
        layers=78,
        dense_layers=3,
        inner=12288,
        shared=1,
        bias=True,
        vocab=154880,
        attention=Latent(heads=64, q_lora=2048, nope=192, value=256, index_heads=32),
        left_out=(PREDICTION,),
    ),
}
