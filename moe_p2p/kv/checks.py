"""Arguments of KV workers and of their requests: wrong ones are refused where they are given, and
not by a thread that finds them later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_p2p.errors import require, require_type
from moe_p2p.kv.layout import KVLayout
from moe_p2p.kv.link import KVLink

if TYPE_CHECKING:
    from moe_p2p.kv.pair import KVCache

_MOST_TOKENS = (1 << 32) - 1  # of a tail


def check_tensors(cache: KVCache) -> None:
    """Contiguous, on one device, and each holds all pages of the layers that lie in it."""
    tensors = cache.tensors
    require_type("KVCache.tensors", tensors, (tuple, list), "a tuple of torch.Tensors")
    require(bool(tensors), "KVCache.tensors is empty, must have the memory of all layers")
    for number, tensor in enumerate(tensors):
        name = f"KVCache.tensors[{number}]"
        require_type(name, tensor, Tensor)
        require(tensor.device.type != "meta", f"{name} is on the meta device: it has no bytes")
        require(tensor.is_contiguous(), f"{name} must be contiguous; pass .contiguous()")
        require(
            tensor.device == tensors[0].device,
            f"{name} is on {tensor.device}, others on {tensors[0].device}; must be one device",
        )


def check_places(cache: KVCache) -> None:
    """All pages of each layer lie within the tensor that its place names."""
    layout = cache.layout
    for group, layers in zip(layout.groups, cache.layers, strict=True):
        count = cache.pages[group.name]
        require_type(f"KVCache.pages[{group.name!r}]", count, int, "an int")
        require(count > 0, f"KVCache.pages[{group.name!r}] is {count}, must be at least 1")
        tokens = group.page_size - 1
        for layer in layers:
            for i, part in enumerate(layout.parts(group, len(layers))):
                place = layer[i if len(layer) > 1 else 0]
                heads = max(group.heads // layout.tp, 1) - 1
                end = place.offset + part.offset + (count - 1) * part.page_stride + part.nbytes
                end += heads * part.head_stride + tokens * part.token_stride
                tensor = cache.tensors[place.region]
                nbytes = tensor.numel() * tensor.element_size()
                require(
                    end <= nbytes,
                    f"KVCache of rank {cache.rank}, group {group.name!r}: {count} pages of a layer "
                    f"at byte {place.offset} end at byte {end} of tensor {place.region}, which has "
                    f"{nbytes}",
                )


def check_worker(
    kind: str, engine: Any, timeouts: Any, link: KVLink | None, clock: Callable[[], float]
) -> None:
    from moe_p2p.kv.worker import KVTimeouts

    require(hasattr(engine, "provider"), f"{kind}: engine is {engine!r}, must be an Engine")
    require_type(f"{kind}: timeouts", timeouts, KVTimeouts, "a KVTimeouts or None")
    require_type(f"{kind}: link", link, (KVLink, type(None)), "a KVLink or None")
    require(callable(clock), f"{kind}: clock is {clock!r}, must be a function")


def check_request(who: str, request: str, total: int) -> None:
    require(
        isinstance(request, str) and bool(request), f"{who}: request is {request!r}, must be a name"
    )
    name = f"{who}: request {request!r}: total"
    require_type(name, total, int, "an int")
    require(0 <= total <= _MOST_TOKENS, f"{name} is {total}, must be 0 to {_MOST_TOKENS}")


def page_lists(who: str, layout: KVLayout, pages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `pages`: lists of groups that the layout has."""
    require_type(f"{who}: pages", pages, Mapping, "a dict of torch.Tensors by group")
    names = [group.name for group in layout.groups]
    for name, each in pages.items():
        what = f"{who}: pages of group {name!r}"
        require(name in names, f"{what}: there is no such group, only {names}")
        require_type(what, each, Tensor)
        require(
            each.dtype == torch.int32 and each.dim() == 1 and each.device.type == "cpu",
            f"{what} are {each.dtype} {list(each.shape)} on {each.device}, must be int32 [n] on "
            "the CPU",
        )
    return {name: each.clone() for name, each in pages.items()}


def check_bounds(who: str, counts: Mapping[str, int], pages: Mapping[str, Tensor]) -> None:
    """Another layer lies behind a layer's last page."""
    for name, each in pages.items():
        if len(each) and not (int(each.min()) >= 0 and int(each.max()) < counts[name]):
            bad = each[(each < 0) | (each >= counts[name])][:4].tolist()
            require(False, f"{who}: group {name!r} has {counts[name]} pages, not {bad}")


def check_sends(name: str, sends: Sequence[Any], kind: type) -> None:
    require_type(f"{name}: sends", sends, (list, tuple), "a list of (request, end)")
    for each in sends:
        require(
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], kind),
            f"{name}: sends has {each!r}, must be (KVSending, end or None)",
        )
