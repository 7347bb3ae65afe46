"""Ways of kernels: their text, and what kernels are compiled with."""

from __future__ import annotations

import pytest
import torch

from moe_p2p import AllToAllConfig, errors
from moe_p2p.gpu.kernel_ways import WAYS, macros_of
from moe_p2p.gpu.kernels import Kernel, clean_kernel, combine_kernel, dispatch_kernel
from moe_p2p.gpu.shape_macros import shape_macros

PLACE = "dispatch_receive=place"


def kernel(*, by_rank: bool = True, topk: int = 8, hidden_dim: int = 7168) -> Kernel:
    config = AllToAllConfig(
        num_experts=256, hidden_dim=hidden_dim, topk=topk, max_tokens=4096, num_sms=24
    )
    shape = shape_macros(config, world_size=8, ranks_per_node=8)
    return dispatch_kernel(
        shape, torch.float8_e4m3fn, quantize=False, by_rank=by_rank, num_sms=config.num_sms
    )


def test_the_first_way_is_the_present_one() -> None:
    assert macros_of("") == macros_of(",".join(f"{part}={next(iter(WAYS[part]))}" for part in WAYS))
    assert macros_of("") == {}


def test_an_unknown_way_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="'dispatch_recv' is no part; there are"):
        macros_of("dispatch_recv=place")
    with pytest.raises(errors.InvalidArgumentError, match="is 'lanes', must be rings or place"):
        macros_of("dispatch_receive=lanes")


def test_a_communicator_takes_ways_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    present = kernel()
    assert not any("COPIER" in name or "ROUTE" in name for name in present.macros)
    monkeypatch.setenv("MOE_P2P_KERNEL_SETTINGS", f"{PLACE},dispatch_routing=pieces")
    placing = kernel()
    assert placing.macros["MOE_P2P_COPIERS"] == 4
    assert placing.macros["MOE_P2P_COPIER_IMAGES"] == 7
    assert placing.max_send_blocks == placing.max_recv_blocks
    threads = (k.macros["MOE_P2P_BLOCK_THREADS"] for k in (placing, present))
    assert next(threads) - next(threads) == 32
    assert placing.macros["MOE_P2P_SHARED_BYTES"] <= 227 << 10


@pytest.mark.parametrize(
    "other", [{"by_rank": False}, {"topk": 16}, {"hidden_dim": 32768}], ids=str
)
def test_rings_stay_where_slots_cannot_be_placed(
    other: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_P2P_KERNEL_SETTINGS", PLACE)
    assert "MOE_P2P_COPIERS" not in kernel(**other).macros


def test_combine_is_made_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Kernel:
        config = AllToAllConfig(
            num_experts=256, hidden_dim=7168, topk=8, max_tokens=4096, num_sms=24
        )
        shape = shape_macros(config, world_size=8, ranks_per_node=8)
        return combine_kernel(shape, torch.bfloat16, torch.bfloat16, num_sms=24)

    present = made()
    monkeypatch.setenv("MOE_P2P_KERNEL_SETTINGS", "combine_own=y")
    assert made().macros == present.macros | {"MOE_P2P_COMBINE_OWN": 1}


def test_what_is_the_same_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that is measured costs the kernels that it changes, and no others."""

    def made(tokens: int, num_sms: int | None) -> list[Kernel]:
        config = AllToAllConfig(
            num_experts=256, hidden_dim=7168, topk=8, max_tokens=tokens, num_sms=num_sms
        )
        shape = shape_macros(config, world_size=8, ranks_per_node=8)
        fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
        return [
            dispatch_kernel(shape, fp8, quantize=False, by_rank=True, num_sms=num_sms),
            dispatch_kernel(shape, bf16, quantize=True, num_sms=num_sms),
            combine_kernel(shape, bf16, bf16, num_sms=num_sms),
            clean_kernel(shape),
        ]

    few, many = made(4096, 24), made(4096, None)
    for part, ways in WAYS.items():
        monkeypatch.setenv("MOE_P2P_KERNEL_SETTINGS", f"{part}={list(ways)[-1]}")
        assert made(4096, None) == many, "rows do not go in bulk"
        same = [now == before for now, before in zip(made(4096, 24), few, strict=True)]
        in_combine, by_rank_only = part == "combine_own", part == "dispatch_receive"
        assert same == [in_combine, in_combine or by_rank_only, not in_combine, True], part
