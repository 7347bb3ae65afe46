"""Wrong arguments of KV workers, caches and requests are refused where they are given, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import ClosedError, Engine, InvalidArgumentError, UnavailableError, kv
from tests.support.kv_workers import PACKED, random_cache, workers

PAGES, LAYERS = 8, 2
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=1, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
MEMORY, (SIZE,) = kv.dense_memory(LAYOUT, 0, PAGES)


def make_cache(**changes: Any) -> kv.KVCache:
    usual: dict[str, Any] = {
        "layout": LAYOUT,
        "rank": 0,
        "layers": MEMORY.layers,
        "tensors": (torch.zeros(SIZE, dtype=torch.uint8),),
        "pages": {"kv": PAGES},
    }
    return kv.KVCache(**(usual | changes))


def of(*pages: int) -> dict[str, torch.Tensor]:
    return {"kv": torch.tensor(pages, dtype=torch.int32)}


def send(sending: kv.KVSending, user: bytes) -> None:
    with contextlib.suppress(InvalidArgumentError):  # `wait` raises it again
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit(user)


class Pair:
    def __init__(self) -> None:
        self.engines = (Engine(label="p"), Engine(label="d"))
        self.sender = kv.KVSender(self.engines[0], make_cache(), instance="p")
        self.receiver = kv.KVReceiver(self.engines[1], make_cache(), instance="d")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made, store = Pair(), HashStore()
    with (
        kv.LeaseKeeper(made.sender, kv.TorchLeases(store)),
        kv.LeaseKeeper(made.receiver, kv.TorchLeases(store)),
    ):
        made.receiver.wait_for("p")
        made.sender.wait_for("d")
        yield made
    for engine in made.engines:
        engine.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensors": (torch.zeros(SIZE * 2, dtype=torch.uint8)[::2],)}, "must be contiguous"),
        ({"tensors": (torch.zeros(SIZE - 1, dtype=torch.uint8),)}, "8 pages of a layer .* end at"),
        ({"tensors": (torch.zeros(SIZE, device="meta"),)}, "on the meta device"),
        ({"tensors": (1,)}, r"KVCache.tensors\[0\] is 1"),
        ({"tensors": ()}, "is empty"),
        ({"pages": {"kv": PAGES + 1}}, "9 pages of a layer"),
        ({"pages": {"kv": 0}}, "must be at least 1"),
        ({"pages": {"kv": "8"}}, "must be an int"),
        ({"pages": None}, "KVCache.pages is None"),
        ({"rank": "0"}, "KVCache.rank is '0'"),
        ({"layers": None}, "KVCache.layers is None"),
    ],
)
def test_a_cache_that_no_worker_could_use_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make_cache(**changes)


@pytest.mark.parametrize("order", kv.ORDERS)
def test_a_cache_of_exactly_its_pages_is_taken(order: str) -> None:
    layout = kv.KVLayout((GROUP,), order=order)
    memory, sizes = kv.dense_memory(layout, 0, PAGES)
    tensors = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    kv.KVCache(layout, 0, memory.layers, tensors, {"kv": PAGES})
    with pytest.raises(InvalidArgumentError, match="9 pages of a layer"):
        kv.KVCache(layout, 0, memory.layers, tensors, {"kv": PAGES + 1})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda e: kv.KVSender(None, make_cache(), instance="x"), "engine is None"),
        (lambda e: kv.KVSender(e, make_cache(), instance="x", timeouts=5), "timeouts is 5"),
        (lambda e: kv.KVSender(e, make_cache(), instance="x", link="cx7"), "link is 'cx7'"),
        (lambda e: kv.KVReceiver(e, make_cache(), instance="x", verify=0.5), "verify is 0.5"),
        (lambda e: kv.KVTimeouts(lease_s=float("inf")), "lease_s is inf"),
        (lambda e: kv.KVTimeouts(lease_s=float("nan")), "lease_s is nan"),
        (lambda e: kv.TorchLeases(None), "store is None"),
        (lambda e: kv.TorchLeases(HashStore(), float("nan")), "lease_s is nan"),
        (lambda e: kv.LeaseKeeper(None, kv.TorchLeases(HashStore())), "worker is None"),
        (lambda e: kv.KVSignals(kv.KVReceiver(e, make_cache(), instance="x")), "is no KVSender"),
        (lambda e: kv.dense_memory(LAYOUT, 1, 4), "rank is 1, must be 0 to 0"),
        (lambda e: kv.dense_memory(LAYOUT, 0, -1), "num_pages is -1"),
        (lambda e: kv.dense_memory(LAYOUT, 0, 1.5), "num_pages is 1.5"),
    ],
)
def test_workers_name_what_they_do_not_take(make: Callable[[Engine], object], text: str) -> None:
    with Engine() as engine, pytest.raises(InvalidArgumentError, match=text):
        make(engine)


def test_an_address_of_another_machine_is_named() -> None:
    with Engine() as engine:
        sender = kv.KVSender(engine, make_cache(), instance="x")
        with pytest.raises(UnavailableError, match=r"x/0: host='host.invalid' is no address of"):
            kv.LeaseKeeper(sender, kv.TorchLeases(HashStore()), host="host.invalid")


BAD_LISTS = [
    (None, "pages is None"),
    ({"kv": None}, "pages of group 'kv' is None"),
    (
        {"kv": [1, 2]},
        r"pages of group 'kv' is of type list, must be a torch.Tensor; pass torch.as_tensor\(...\)",
    ),
    ({"kv": torch.tensor([1, 2])}, "must be int32"),
    ({"kv": torch.zeros(2, 2, dtype=torch.int32)}, "must be int32"),
    ({"kv": torch.zeros(2, dtype=torch.int32, device="meta")}, "on the CPU"),
    (of(1, 2) | {"other": torch.zeros(1, dtype=torch.int32)}, "no such group"),
    (of(1, PAGES), r"has 8 pages, not \[8\]"),
    (of(-1, 1), r"has 8 pages, not \[-1\]"),
]


@pytest.mark.parametrize(("pages", "text"), [*BAD_LISTS, (of(3, 3), "name one twice")])
def test_reserve_refuses_wrong_pages_and_holds_none(pair: Pair, pages: Any, text: str) -> None:
    freed: list[bool] = []
    with pytest.raises(InvalidArgumentError, match=text):
        pair.receiver.reserve("r", "p", pages, total=8, on_free=lambda: freed.append(True))
    assert not freed  # they never were the receiver's
    reservation = pair.receiver.reserve("r", "p", of(*range(PAGES)), total=4 * PAGES)
    reservation.cancel()
    reservation.wait_reusable(10)


@pytest.mark.parametrize(("pages", "text"), BAD_LISTS)
def test_start_refuses_pages_that_are_not_the_cache_s(pair: Pair, pages: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        pair.sender.start("s", "d", pages, total=8)
    assert not pair.sender.sendings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"total": -1}, "total is -1"),
        ({"total": "8"}, "total is '8'"),
        ({"total": 1 << 40}, "total is 1099511627776"),
        ({"request": None}, "request is None"),
        ({"request": ""}, "request is ''"),
    ],
)
def test_requests_are_checked_by_both_sides(pair: Pair, changes: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"request": "q", "pages": of(1, 2), "total": 8} | changes
    request, pages = usual.pop("request"), usual.pop("pages")
    with pytest.raises(InvalidArgumentError, match=text):
        pair.sender.start(request, "d", pages, **usual)
    with pytest.raises(InvalidArgumentError, match=text):
        pair.receiver.reserve(request, "p", pages, **usual)


def test_a_name_is_one_request_at_a_time(pair: Pair) -> None:
    reservation = pair.receiver.reserve("twice", "p", of(1), total=4)
    with pytest.raises(InvalidArgumentError, match="'twice' is reserved; a retry takes another"):
        pair.receiver.reserve("twice", "p", of(2), total=4)
    sending = pair.sender.start("twice", "d", of(1), total=4)
    with pytest.raises(InvalidArgumentError, match="'twice' is under way; a retry takes another"):
        pair.sender.start("twice", "d", of(2), total=4)
    send(sending, b"")
    reservation.wait(10)
    sending.wait(10)


def test_a_request_without_pages_of_a_group_fails_alone(pair: Pair) -> None:
    """Not by an error in the thread that reads messages, which would end the pair."""
    others = pair.receiver.reserve("other", "p", of(3), total=4)
    sending = pair.sender.start("none", "d", {}, total=4)
    reservation = pair.receiver.reserve("none", "p", of(1), total=4)
    send(sending, b"")
    with pytest.raises(InvalidArgumentError, match="source gave no pages of group 'kv'"):
        sending.wait(10)
    with pytest.raises(RuntimeError, match=r"gave no pages|gave up"):
        reservation.wait(10)
    assert others.state == "open"
    sender = pair.sender.start("other", "d", of(3), total=4)
    send(sender, b"still there")
    assert others.wait(10) == b"still there"


def test_an_error_of_on_free_does_not_end_the_pair(pair: Pair) -> None:
    def on_free() -> None:
        raise ValueError("a bug of the caller's")

    for request in ("first", "second"):
        reservation = pair.receiver.reserve(request, "p", of(1), total=4, on_free=on_free)
        sending = pair.sender.start(request, "d", of(1), total=4)
        send(sending, request.encode())
        assert reservation.wait(10) == request.encode()
        sending.wait(10)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1"])
def test_waits_take_seconds(pair: Pair, timeout_s: Any) -> None:
    reservation = pair.receiver.reserve(f"wait {timeout_s}", "p", of(1), total=4)
    for wait in (reservation.wait, reservation.wait_reusable):
        with pytest.raises(InvalidArgumentError, match="timeout_s is"):
            wait(timeout_s)
    with pytest.raises(InvalidArgumentError, match="timeout_s is"):
        pair.receiver.wait_for("nobody", timeout_s)
    reservation.cancel()
    reservation.wait_reusable(10)


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_lists_that_change_after_the_call_are_not_read_again(pull: bool) -> None:
    """Writes land in the pages that were reserved, and come from the pages that were named."""
    layout = kv.KVLayout((kv.KVGroup("kv", (0,), 1, 32, 32, 4),))
    for link in (None, PACKED):
        with workers(layout, layout, link=link) as found:
            sender, receiver = found.senders[0], found.receivers[0]
            random_cache(sender.cache, 1)
            ours, theirs = (
                torch.tensor([3], dtype=torch.int32),
                torch.tensor([9], dtype=torch.int32),
            )
            reservation = receiver.reserve("a", "prefill", {"kv": theirs}, total=4, pull=pull)
            theirs.fill_(1)
            sending = sender.start("a", "decode", {"kv": ours}, total=4)
            ours.fill_(7)
            sending.layer(0)
            sending.commit()
            reservation.wait(20)
            page = receiver.cache.tensors[0].numel() // 32
            arrived = receiver.cache.tensors[0].view(32, page)
            assert torch.equal(arrived[9], sender.cache.tensors[0].view(32, page)[3])
            assert not arrived[1].any()


def test_what_is_closed_says_so() -> None:
    with workers(LAYOUT, LAYOUT) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        keeper = found.keepers[sender.name]
        keeper.close()
        with pytest.raises(ClosedError, match="prefill/0: its LeaseKeeper is closed; make"):
            keeper.__enter__()
        for engine in found.engines.values():
            engine.close()
        with pytest.raises(ClosedError, match="prefill/0: its engine is closed"):
            sender.start("a", None, of(0), total=1)
        with pytest.raises(ClosedError, match="decode/0: its engine is closed"):
            receiver.reserve("a", "prefill", of(0), total=1)
