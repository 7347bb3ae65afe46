"""A transformer of a few layers over a paged KV cache, with weights drawn from a seed.

Its text is nonsense; what matters is that the same prompt gives the same tokens wherever its layers
run. Used by moe_p2p/examples/disaggregated.py.

Shapes: L layers, P pages of N tokens, H heads of D values, T tokens of a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import kv

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS, VOCABULARY = 4, 4, 16, 8, 256
HIDDEN = HEADS * HEAD_DIM
MOST_TOKENS = 512
_HEAD_BYTES = HEAD_DIM * 4
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), HEADS, _HEAD_BYTES, _HEAD_BYTES, PAGE_TOKENS)
LAYOUT = kv.KVLayout((GROUP,), "NHD")


def make_cache(num_pages: int, device: str) -> kv.KVCache:
    memory, (nbytes,) = kv.dense_memory(LAYOUT, 0, num_pages)
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    return kv.KVCache(LAYOUT, 0, memory.layers, (tensor,), {"kv": num_pages})


class SmallModel:
    def __init__(self, device: str, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            drawn: Tensor = torch.randn(*shape, generator=generator) * shape[0] ** -0.5
            return drawn.to(device)

        self.device = device
        self.embedding = weight(VOCABULARY, HIDDEN) * 8
        self.positions = weight(MOST_TOKENS, HIDDEN) * 8
        self.layers = [
            (weight(HIDDEN, 3 * HIDDEN), weight(HIDDEN, HIDDEN), weight(HIDDEN, 4 * HIDDEN),
             weight(4 * HIDDEN, HIDDEN))
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.head = weight(HIDDEN, VOCABULARY)

    @torch.no_grad()
    def forward(
        self,
        cache: kv.KVCache,
        pages: Tensor,
        tokens: list[int],
        begin: int,
        after_layer: Callable[[int], None] = lambda layer: None,
    ) -> int:
        """Runs tokens at positions `begin` on, keeps their K and V, and returns the next token.

        after_layer: called when a layer's K and V of these tokens are in the cache.
        """
        view = cache.tensors[0].view(LAYERS, -1, 2, PAGE_TOKENS, HEADS, HEAD_DIM)  # [L,P,2,N,H,D]
        at = torch.arange(begin, begin + len(tokens), device=self.device)
        of_page = pages.to(self.device).long()
        x = self.embedding[torch.tensor(tokens, device=self.device)] + self.positions[at]  # [T, .]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = (
                (functional.rms_norm(x, (HIDDEN,)) @ qkv).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
            )
            view[layer, of_page[at // PAGE_TOKENS], 0, at % PAGE_TOKENS] = k
            view[layer, of_page[at // PAGE_TOKENS], 1, at % PAGE_TOKENS] = v
            if self.device != "cpu":
                # The NIC reads what kernels wrote. The current device of a thread that has set none
                # is 0, wherever the model is.
                torch.cuda.current_stream(self.device).synchronize()
            after_layer(layer)
            x = x + self._attend(view[layer, of_page], q, at) @ out
            x = x + functional.silu(functional.rms_norm(x, (HIDDEN,)) @ up) @ down
        return int((functional.rms_norm(x[-1], (HIDDEN,)) @ self.head).argmax())

    @staticmethod
    def _attend(pages: Tensor, q: Tensor, at: Tensor) -> Tensor:
        """pages: [P, 2, N, H, D] of the request; q: [T, H, D] at positions `at`."""
        k, v = pages.transpose(0, 1).flatten(1, 2)[:, : int(at[-1]) + 1]  # [tokens, H, D] each
        scores = torch.einsum("thd,shd->hts", q, k) * HEAD_DIM**-0.5
        seen = torch.arange(len(k), device=q.device)[None] <= at[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended: Tensor = torch.einsum("hts,shd->thd", weights, v)
        return attended.flatten(1)


def generate(model: SmallModel, prompt: list[int], num_tokens: int, chunk: int) -> list[int]:
    """All of a request in this process: what the disaggregated one must equal."""
    total = len(prompt) + num_tokens
    cache = make_cache(-(-total // PAGE_TOKENS), model.device)
    pages = torch.arange(cache.pages["kv"], dtype=torch.int32)
    token = 0
    for begin in range(0, len(prompt), chunk):
        token = model.forward(cache, pages, prompt[begin : begin + chunk], begin)
    tokens = [token]
    while len(tokens) < num_tokens:
        tokens.append(model.forward(cache, pages, tokens[-1:], len(prompt) + len(tokens) - 1))
    return tokens
