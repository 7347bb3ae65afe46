"""KV requests on a GPU whose rows are small: packed ones, and the kernel of checksums."""

from __future__ import annotations

import pytest
import torch

from moe_p2p import kv
from tests.gpu.test_triton_kernels import launches
from tests.support.kv_workers import random_cache, some_pages, workers

LAYERS, PAGES = 3, 32


def sums() -> None:
    from moe_p2p.kernels.triton.kv_checksum import rows_checksum

    rows_checksum(torch.empty(1 << 20).byte(), torch.arange(9), (0, 4608, 576, 8, 576), 0)


def test_numbers_of_a_layer_do_not_compile_a_kernel_anew() -> None:
    """It would take a tenth of a second, in a request, under the worker's lock."""
    for launch in launches(sums):
        found = [
            each.name
            for each in launch.kernel.params
            if not (each.is_constexpr or each.do_not_specialize)
        ]
        assert all(name.endswith("_ptr") for name in found)


@pytest.mark.gpu
@pytest.mark.parametrize("lands", [False, True], ids=["scattered", "lands in pages"])
def test_requests_are_packed_between_gpu_caches(lands: bool) -> None:
    """Tokens of 576 B are dealt to two ranks; a ring of three parts is less than a layer."""
    group = kv.KVGroup("kv", tuple(range(LAYERS)), heads=1, k_bytes=576, v_bytes=0, page_size=16)
    prefill, decode = kv.KVLayout((group,)), kv.KVLayout((group,), tp=2, dcp=2)
    rates = (1e9, 1e6) if lands else (1e9, 1e3)
    link = kv.KVLink("test", *rates, packed_write_bytes=3 << 12, ring_bytes=3 * (3 << 12))
    with workers(prefill, decode, link=link, settings="seed=3", devices=("cuda:0",) * 2) as found:
        sender = found.senders[0]
        random_cache(sender.cache, 1)
        ours, theirs = some_pages(20, PAGES, 1), some_pages(10, PAGES, 2)
        assert all(
            move.why_packed and move.lands == lands
            for pair in sender.pairs.values()
            for move in pair.plan.moves
        )
        waiting = [
            each.reserve("r", "prefill", {"kv": theirs}, total=320) for each in found.receivers
        ]
        sending = sender.start("r", "decode", {"kv": ours}, total=320)
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        for reservation in waiting:
            reservation.wait(30)  # with the checksums of both sides
        sending.wait(30)
        assert all(each.packed_writes for each in sending.transfers)
        sent = sender.cache.tensors[0].view(LAYERS, PAGES, 16, 576)[:, ours.long()]
        for rank, receiver in enumerate(found.receivers):
            got = receiver.cache.tensors[0].view(LAYERS, PAGES, 16, 576)[:, theirs.long()]
            assert torch.equal(got.flatten(1, 2), sent.flatten(1, 2)[:, rank::2])
