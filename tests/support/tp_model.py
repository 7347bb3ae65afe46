"""A model of two layers as an inference engine's tensor-parallel rank holds it: fused qkv, rows and
columns cut; its loader takes parameters of the checkpoint one by one, in any order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HIDDEN, HEADS, LAYERS, VOCAB = 16, 8, 2, 12


def checkpoint(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}.attn"
        shapes |= {f"{at}.{name}.weight": (HEADS * 4, HIDDEN) for name in ("q", "k", "v")}
        shapes[f"{at}.o.weight"] = (HIDDEN, HEADS * 4)
        shapes[f"layers.{layer}.norm.weight"] = (HIDDEN,)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


class TpModel(torch.nn.Module):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.loads = rank, world_size, 0
        rows = HEADS * 4 // world_size

        def made(*shape: int) -> torch.nn.Module:
            module = torch.nn.Module()
            data = torch.full(shape, 0.5, dtype=torch.bfloat16)
            module.weight = torch.nn.Parameter(data, requires_grad=False)
            return module

        self.embed, self.norm = made(VOCAB, HIDDEN), made(HIDDEN)
        self.layers = torch.nn.ModuleList()
        for _ in range(LAYERS):
            layer = torch.nn.Module()
            layer.attn = torch.nn.Module()
            layer.attn.qkv, layer.attn.o = made(3 * rows, HIDDEN), made(HIDDEN, rows)
            layer.norm = made(HIDDEN)
            self.layers.append(layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        own = dict(self.named_parameters())
        for name, whole in weights:
            *path, which, _ = name.split(".")
            target, part = name, whole
            if which in "qkv":
                target = ".".join([*path, "qkv", "weight"])
                part = whole.chunk(self.world_size)[self.rank]
                into = own[target].data.chunk(3)["qkv".index(which)]
            else:
                part = whole.chunk(self.world_size, 1)[self.rank] if which == "o" else whole
                into = own[target].data
            into.copy_(part)
            loaded.add(target)
        self.loads += 1
        return loaded

    def holds(self, version: int | None) -> bool:
        """Every tensor is the version's; None: as it was made."""
        if version is None:
            return all(bool((each == 0.5).all()) for each in self.parameters())
        wanted = TpModel(self.rank, self.world_size)
        wanted.load_weights(checkpoint(version).items())
        theirs = dict(wanted.named_parameters())
        return all(torch.equal(each, theirs[name]) for name, each in self.named_parameters())
