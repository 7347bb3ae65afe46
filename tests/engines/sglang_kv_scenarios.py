"""A prefill and a decode server of SGLang: their KV managers, senders and receivers, in the order
of calls of SGLang's prefill.py and decode.py. test_sglang_kv.py runs them.

    python -m tests.engines.sglang_kv_scenarios FILE [SCENARIO ...]
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.engines import absent
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused
from tests.support.blocking_store import Blocking, check_steps, counted

scenario = Scenarios()
PAGE, LAYERS, HEADS, DIM, SLOTS = 4, 3, 2, 8, 8
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
_HTTP = "aiohttp requests urllib3 zmq"


def begin() -> None:
    wanted = [name for name in absent.SGLANG.split() if name not in _HTTP.split()]
    absent.importing("sglang", " ".join(wanted))
    os.environ["MOE_P2P_KV_STORE"] = f"127.0.0.1:{free_port()}"
    os.environ["MOE_P2P_ENGINES"] = "1"
    os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = "200"
    os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] = "100"
    from sglang.srt.disaggregation.common import conn

    bags = {
        "serving": {"host": "127.0.0.1", "port": 30000},
        "disagg": {
            "disaggregation_bootstrap_port": 0,
            "disaggregation_decode_allocation_policy": "early",
        },
        "observability": {"enable_trace": False},
        "parallel": {
            "attn_tp_size": 1,
            "attn_tp_rank": 0,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dcp_size": 1,
            "attn_dcp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "dp_size": 1,
            "num_dp_ranks": 1,
            "nnodes": 1,
            "pp_size": 1,
            "pp_group": None,
            "dist_init_addr": None,
            "load_balance_method": "follow_bootstrap_room",
            "enable_kv_cache_sharding": False,
            "enable_dsa_cache_layer_split": False,
            "enable_cp_tp_group_sharing": False,
        },
    }
    for name, fields in bags.items():
        SETTINGS[name] = types.SimpleNamespace(**fields)
        setattr(conn, f"get_{name}", lambda name=name: SETTINGS[name])
    logging.Logger.warning_once = logging.Logger.warning  # SGLang adds it where a server starts
    conn.linear_attn_tp_size = lambda: SETTINGS["parallel"].attn_tp_size
    from moe_p2p.integrations.kv import sglang as sglang_kv

    sglang_kv.install()


SETTINGS: dict[str, Any] = {}


class Stages:
    """The group of pipeline stages, as one of them sees it: what others say is known. sent: what
    each stage has sent to it, in the order in which stages are called."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers, self.said, self.sent = layers, list[Any](), list[Any]()

    def all_gather_object(self, obj: Any) -> list[Any]:
        assert obj in self.layers
        return list(self.layers)

    def broadcast_object(self, obj: Any, src: int) -> Any:
        if obj is not None:
            self.said.append(obj)
        return self.said[src]

    def send_object(self, obj: Any, dst: int, **_: Any) -> list[Any]:
        self.sent.append((dst, obj))
        return []

    def recv_object(self, src: int, **_: Any) -> Any:
        to, obj = self.sent.pop(0)
        assert to == src + 1
        return obj


class Rank:
    """A scheduler's pools and KV manager. stages: layers of all pipeline stages; stage: its own."""

    def __init__(
        self,
        mode: str,
        tp: int,
        rank: int,
        *,
        mla: bool = False,
        pages: int = 32,
        stages: tuple[int, ...] = (LAYERS,),
        stage: int = 0,
        group: Any = None,
    ) -> None:
        from sglang.srt.disaggregation import utils

        vars(SETTINGS["parallel"]).update(
            attn_tp_size=tp, attn_tp_rank=rank, pp_size=len(stages), pp_group=group
        )
        first = sum(stages[:stage])
        layers = range(first, first + stages[stage])
        self.numbers = [*layers, *([] if mla else (LAYERS + layer for layer in layers))]
        self.mla, heads = mla, 1 if mla else max(HEADS // tp, 1)
        self.heads = range(rank * heads, rank * heads + heads) if not mla else range(1)
        shape = (pages * PAGE, heads, DIM)
        self.buffers = [torch.zeros(shape, dtype=torch.int16) for _ in self.numbers]
        self.aux = utils.MetadataBuffers(SLOTS, 16, torch.bfloat16, 0)
        args = utils.get_kv_class(utils.TransferBackend.MOONCAKE, utils.KVClassType.KVARGS)()
        args.engine_rank = rank
        args.kv_data_ptrs = [each.data_ptr() for each in self.buffers]
        args.kv_data_lens = [each.nbytes for each in self.buffers]
        args.kv_item_lens = [each[0].nbytes * PAGE for each in self.buffers]
        args.kv_layer_ids = list(layers)
        args.kv_cache_dtype_str = "bfloat16"
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.aux.get_buf_infos()
        args.state_types = args.state_data_ptrs = args.state_data_lens = args.state_item_lens = []
        args.kv_head_num, args.total_kv_head_num = heads, 1 if mla else HEADS
        args.page_size, args.gpu_id, args.ib_device = PAGE, 0, ""
        args.system_dp_rank, args.pp_rank = 0, stage
        self.args = args
        self.manager = kv_class("MANAGER")(
            args,
            utils.DisaggregationMode(mode),
            types.SimpleNamespace(port=30001 + (mode == "decode")),
            mla,
        )

    def bytes_of(self, prompt: int, begin: int, end: int) -> list[torch.Tensor]:
        """[tokens, heads, DIM] of each buffer."""
        token = torch.arange(begin, end)[:, None, None]
        head = torch.tensor(list(self.heads))[None, :, None]
        value = torch.arange(DIM)[None, None, :]
        return [
            ((prompt * 7919 + token * 131 + at * 1009 + head * 37 + value + 1) % 32003).short()
            for at in self.numbers
        ]

    def rows(self, pages: list[int], begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        return torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE

    def write(self, prompt: int, pages: list[int], begin: int, end: int) -> None:
        for buffer, data in zip(self.buffers, self.bytes_of(prompt, begin, end), strict=True):
            buffer[self.rows(pages, begin, end)] = data

    def holds(self, prompt: int, pages: list[int], begin: int, end: int) -> bool:
        return all(
            torch.equal(buffer[self.rows(pages, begin, end)], data)
            for buffer, data in zip(self.buffers, self.bytes_of(prompt, begin, end), strict=True)
        )

    def idle(self) -> bool:
        worker = self.manager.worker
        rest = getattr(worker, "sendings", None) or getattr(worker, "reservations", None)
        return not rest and worker.slots.num_taken == 0


def kv_class(kind: str) -> Any:
    from sglang.srt.disaggregation import utils

    return utils.get_kv_class(utils.TransferBackend.MOONCAKE, utils.KVClassType[kind])


class Servers:
    """A prefiller with its bootstrap server, and a decoder; each call is that of all its ranks."""

    def __init__(
        self,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        stages: tuple[int, ...] = (LAYERS,),
        **more: Any,
    ) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        SETTINGS["disagg"].disaggregation_bootstrap_port = port
        self.bootstrap = kv_class("BOOTSTRAP_SERVER")("127.0.0.1", port)
        groups = [Stages(stages) for _ in range(prefill_tp)]
        self.prefill = [
            Rank(
                "prefill", prefill_tp, rank, stages=stages, stage=stage, group=groups[rank], **more
            )
            for rank in range(prefill_tp)
            for stage in range(len(stages))
        ]
        self.decode = [Rank("decode", decode_tp, rank, **more) for rank in range(decode_tp)]

    def close(self) -> None:
        for rank in [*self.decode, *self.prefill]:
            rank.manager.teardown()
        self.bootstrap.close()

    def senders(self, room: int) -> list[Any]:
        return [kv_class("SENDER")(rank.manager, self.address, room) for rank in self.prefill]

    def receivers(self, room: int) -> list[Any]:
        found = []
        for rank in self.decode:
            wait(lambda rank=rank: rank.manager.try_ensure_parallel_info(self.address))
            receiver = kv_class("RECEIVER")(rank.manager, self.address, room)
            receiver.init(0)
            assert receiver.poll() == WAITING
            found.append(receiver)
        return found


@contextmanager
def servers(*given: Any, **more: Any) -> Iterator[Servers]:
    made = Servers(*given, **more)
    try:
        yield made
    finally:
        made.close()


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not until():
        assert time.monotonic() < end, f"waited {HANG_S} s"
        time.sleep(0.0005)


def poll(each: list[Any], state: int) -> None:
    wait(lambda: [one.poll() for one in each] == [state] * len(each))


def polls_of(senders: list[Any]) -> list[int]:
    """Before a request begins: SGLang's first stage asks all, and the others are not polled."""
    return [
        sender.poll_pp_consensus() if sender.kv_mgr.pp_size > 1 else sender.poll()
        for sender in senders
        if sender.kv_mgr.pp_rank == 0
    ]


def poll_opened(senders: list[Any], receivers: list[Any]) -> None:
    """Both sides poll until the decoder's pages are known: receivers wait to be connected."""
    wait(lambda: [each.poll() for each in receivers] and set(polls_of(senders)) == {WAITING})


def pages(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int32)


def transfer(made: Servers, room: int, chunks: list[int], prefix: int = 0) -> None:
    """One request: the decoder's pages 20 on, of which it has `prefix`; the prefiller's 3 on."""
    count, (aux, aux_there) = sum(chunks), (2, 5)
    ours, theirs = list(range(3, 3 + count)), list(range(20, 20 + count))
    senders, receivers = made.senders(room), made.receivers(room)
    assert set(polls_of(senders)) == {BOOTSTRAPPING}
    for rank, receiver in zip(made.decode, receivers, strict=True):
        rank.write(room + 1, theirs, 0, prefix * PAGE)  # of somebody else: not to be touched
        receiver.send_metadata(
            pages(*theirs[prefix:]), aux_there, [], decode_prefix_len=prefix * PAGE
        )
    poll_opened(senders, receivers)
    for sender in senders:
        assert sender.pop_decode_prefix_len() == prefix * PAGE
        sender.init(count - prefix, aux)
    at = prefix
    for chunk in np.cumsum(chunks):
        for rank, sender in zip(made.prefill, senders, strict=True):
            rank.write(room, ours, 0, int(chunk) * PAGE)
            if chunk == count:
                rank.aux.output_ids[aux, 0] = 4242 + room
                rank.aux.bootstrap_room[aux, 0] = room
            sender.send(pages(*ours[at:chunk]))
        at = max(at, int(chunk))
    poll([*senders, *receivers], SUCCESS)
    for rank in made.decode:
        assert rank.holds(room + 1, theirs, 0, prefix * PAGE)
        assert rank.holds(room, theirs, prefix * PAGE, count * PAGE)
        assert int(rank.aux.output_ids[aux_there, 0]) == 4242 + room
        assert int(rank.aux.bootstrap_room[aux_there, 0]) == room
    for one in [*senders, *receivers]:
        one.clear()
    for sender in senders:
        metric = sender.get_transfer_metric()
        assert metric.transfer_latency_s > 0
        assert metric.transfer_total_bytes > 0
    sent = sum(sender.get_transfer_metric().transfer_total_bytes for sender in senders)
    pages_there = sum(rank.manager.kv_item_lens_sum for rank in made.decode) * (count - prefix)
    assert pages_there < sent < pages_there + 100_000, "pages, metadata and tails"
    wait(lambda: all(rank.idle() for rank in [*made.prefill, *made.decode]))


@scenario
def the_plugin_puts_our_classes_in_the_place_of_a_backend() -> None:
    from sglang.srt.disaggregation import decode, prefill, utils
    from sglang.srt.disaggregation.common import conn

    from moe_p2p.integrations.moe import sglang

    sglang.plugin()
    for module in (utils, prefill, decode):
        found = module.get_kv_class(utils.TransferBackend.MOONCAKE, utils.KVClassType.SENDER)
        assert found.__name__ == "MoeP2pKVSender"
        assert issubclass(found, conn.CommonKVSender)
        fake = module.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
        assert fake.__name__ == "FakeKVSender"


@scenario
def pages_and_metadata_of_a_request() -> None:
    with servers() as made:
        transfer(made, 11, [5])
        transfer(made, 12, [1])
        for side, limit in ((made.prefill, 200), (made.decode, 100)):
            timeouts = side[0].manager.worker.timeouts
            assert (timeouts.open_s, timeouts.tail_s) == (limit, limit), "SGLang's own"


@scenario
def chunks_and_a_prefix_that_the_decoder_has() -> None:
    with servers() as made:
        transfer(made, 21, [2, 2, 1])
        transfer(made, 22, [3, 2], prefix=2)


@scenario
def two_ranks_to_one() -> None:
    with servers(2, 1) as made:
        transfer(made, 31, [2, 3])


@scenario
def one_rank_to_two() -> None:
    with servers(1, 2) as made:
        transfer(made, 41, [2, 3], prefix=1)


@scenario
def a_latent() -> None:
    with servers(2, 2, mla=True) as made:
        transfer(made, 51, [2, 3])


@scenario
def a_store_that_blocks_stops_no_poll_and_no_request() -> None:
    from moe_p2p.integrations.kv import sglang as sglang_kv
    from moe_p2p.integrations.kv import worker as kv_worker

    store, join = Blocking(HashStore()), kv_worker.join_store
    kv_worker.join_store = lambda _: store
    try:
        with servers() as made, counted(sglang_kv.Sender, sglang_kv.Receiver) as cost:
            transfer(made, 53, [2])
            waiting = [*made.senders(54), *made.receivers(54)]
            check_steps(cost, store, lambda: [each.poll() for each in waiting])
            transfer(made, 56, [2, 3])
            store.go_on()
    finally:
        store.go_on()
        kv_worker.join_store = join


@scenario
def pipeline_stages_send_their_layers() -> None:
    """A later stage's senders are told of a decoder though nobody polls them."""
    for given, more in (
        ((2, 1), {"stages": (2, 1)}),
        ((1, 2), {"stages": (1, 2)}),
        ((2, 2), {"stages": (1, 1, 1), "mla": True}),
    ):
        with servers(*given, **more) as made:
            transfer(made, 56, [2, 3], prefix=1)
            transfer(made, 58, [1])
    samples(1, 1, stages=(2, 1))


@scenario
def samples_of_one_room_are_served_each() -> None:
    samples(2, 1)


def samples(*given: Any, **more: Any) -> None:
    """n=3: SGLang sends the prompt once to have it in the prefix cache, then three at once."""
    with servers(*given, **more) as made:
        transfer(made, 55, [2])
        senders, receivers = [made.senders(55) for _ in range(3)], []  # the prefiller is first
        for sample in range(3):
            receivers.append(made.receivers(55)[0])
            receivers[-1].send_metadata(pages(8 + 2 * sample, 9 + 2 * sample), sample, [])
        receivers[1].abort()  # a client that has gone
        for sample in (2, 0):  # in any order
            poll_opened(senders[sample], [receivers[sample]])
            for rank, sender in zip(made.prefill, senders[sample], strict=True):
                rank.write(sample, [20 + 2 * sample, 21 + 2 * sample], 0, 2 * PAGE)
                rank.aux.output_ids[sample + 3, 0] = 4242 + sample
                sender.init(2, sample + 3)
                sender.send(pages(20 + 2 * sample, 21 + 2 * sample))
            poll([*senders[sample], receivers[sample]], SUCCESS)
        assert receivers[1].poll() == FAILED
        for sender in senders[1]:
            sender.init(2, 4)
        poll(senders[1], FAILED)
        manager = made.decode[0].manager
        wait(lambda: manager.is_abort_release_safe(55, 1))
        manager.clear_deferred_abort_state(55)
        assert not manager.reservations
        for sample in (0, 2):
            assert made.decode[0].holds(sample, [8 + 2 * sample, 9 + 2 * sample], 0, 2 * PAGE)
            assert int(made.decode[0].aux.output_ids[sample, 0]) == 4242 + sample
        for one in [*receivers, *(each for rank in senders for each in rank)]:
            one.clear()
        wait(lambda: all(rank.idle() for rank in [*made.prefill, *made.decode]))
        transfer(made, 55, [3])  # the next one


@scenario
def prefill_aborts_before_and_between_chunks() -> None:
    from sglang.srt.disaggregation.common.conn import KVTransferError

    with servers() as made:
        for room, chunks in ((61, 0), (62, 1)):
            (sender,), (receiver,) = made.senders(room), made.receivers(room)
            receiver.send_metadata(pages(20, 21, 22), 1, [])
            poll_opened([sender], [receiver])
            if chunks:
                sender.init(3, 1)
                sender.send(pages(3))
            sender.abort()
            assert sender.poll() == FAILED
            poll([receiver], FAILED)
            with pytest.raises(KVTransferError, match="aborted at the prefiller"):
                receiver.failure_exception()
            assert made.decode[0].manager.is_abort_release_safe(room, 1)
            made.decode[0].manager.clear_deferred_abort_state(room)
        wait(lambda: made.decode[0].idle() and made.prefill[0].idle())
        transfer(made, 63, [3])


@scenario
def decode_aborts_and_gets_its_pages_back_once_nothing_can_land_in_them() -> None:
    with servers() as made:
        manager = made.decode[0].manager
        assert manager.enable_deferred_decode_kv_release
        (sender,), (receiver,) = made.senders(71), made.receivers(71)
        receiver.send_metadata(pages(20, 21, 22), 1, [])
        poll_opened([sender], [receiver])
        sender.init(3, 1)
        sender.send(pages(3))
        receiver.abort()
        assert receiver.abort_notified
        assert receiver.poll() == FAILED
        wait(lambda: manager.is_abort_release_safe(71, 1))
        assert manager.reservations[71][0].reusable
        manager.clear_deferred_abort_state(71)
        receiver.clear()
        poll([sender], FAILED)
        wait(lambda: made.decode[0].idle() and made.prefill[0].idle())
        transfer(made, 72, [3])


@scenario
def decode_rejects_before_it_has_pages() -> None:
    with servers() as made:
        (sender,), (receiver,) = made.senders(81), made.receivers(81)
        wait(lambda: bool(made.decode[0].manager.worker.pairs))
        receiver.abort()
        sender.init(3, 1)
        poll([sender], FAILED)
        wait(lambda: made.decode[0].idle() and made.prefill[0].idle())


@scenario
def pages_that_are_not_carried_fail_their_request() -> None:
    with servers() as made:
        device, host = types.SimpleNamespace(value="device"), types.SimpleNamespace(value="host")
        for room, begin, to, words in (
            (86, 3, device, "decode_prefix_len=3 must be whole pages"),
            (87, 0, host, "KV pages in host memory"),
        ):
            (sender,), (receiver,) = made.senders(room), made.receivers(room)
            wait(lambda: bool(made.decode[0].manager.worker.pairs))
            receiver.send_metadata(pages(20, 21), 1, [], decode_prefix_len=begin, destination=to)
            sender.init(2, 1)
            poll([sender], FAILED)  # it has heard
            assert receiver.poll() == FAILED
            scenario.expect_logged(f"room {room} failed", words)
        (sender,), (receiver,) = made.senders(89), made.receivers(89)
        receiver.send_metadata(pages(20, 21), 1, [])
        poll_opened([sender], [receiver])
        sender.init(2, 1)
        sender.send(pages(3, 10_000))  # none of the pool's
        poll([sender, receiver], FAILED)
        transfer(made, 88, [3])


@scenario
def a_name_that_is_not_resolved_for_a_while_ends_no_scheduler() -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    with servers() as made:
        (sender,), (receiver,) = made.senders(95), made.receivers(95)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", fails)
            receiver.send_metadata(pages(20, 21), 1, [])
            assert receiver.poll() != FAILED
        poll_opened([sender], [receiver])
        sender.init(2, 1)
        sender.send(pages(3, 4))
        poll([sender, receiver], SUCCESS)
        (late,) = made.receivers(96)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", fails)
            late.abort()
            assert late.poll() == FAILED


@scenario
def the_prefiller_ends() -> None:
    with servers() as made:
        (sender,), (receiver,) = made.senders(91), made.receivers(91)
        receiver.send_metadata(pages(20, 21, 22), 1, [])
        poll_opened([sender], [receiver])
        sender.init(3, 1)
        sender.send(pages(3))
        made.prefill[0].manager.teardown()
        poll([receiver], FAILED)
        scenario.expect_logged("room 91", "lost", "/0")
        wait(made.decode[0].idle)


@scenario
def settings_come_from_the_environment() -> None:
    given = {"HOST": "127.0.0.2", "VERIFY": "always", "TIMEOUTS": "tail_s=7"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(f"MOE_P2P_KV_{name}", value)
        with servers() as made:
            for rank in (*made.prefill, *made.decode):
                assert rank.manager.own.keeper.record.host == "127.0.0.2"
                assert rank.manager.worker.timeouts.tail_s == 7
            assert made.decode[0].manager.worker.verify.mode == "always"
            transfer(made, 101, [2])


@scenario
def what_is_not_carried_is_refused_by_name() -> None:
    from sglang.srt.disaggregation.base.conn import StateType

    from moe_p2p.integrations.kv import sglang as sglang_kv

    with servers() as made:
        sglang_kv.check_supported(made.prefill[0].manager)
        manager = made.decode[0].manager
        manager.pp_size = 2
        refused(lambda: sglang_kv.check_supported(manager), "pp_size=2", "decodes", "nixl")
        manager.pp_size = 1
        manager = made.prefill[0].manager
        for name in ("attn_cp_size", "dcp_size", "kv_shard_size"):
            setattr(manager, name, 2)
            refused(functools.partial(sglang_kv.check_supported, manager), f"{name}=2", "nixl")
            setattr(manager, name, 1)
        manager.kv_args.state_types = [StateType.MAMBA]
        refused(lambda: sglang_kv.check_supported(manager), "mamba", "nixl")
        manager.kv_args.state_types = []
        manager.kv_args.num_draft_entries = 1
        refused(lambda: sglang_kv.check_supported(manager), "KV of a draft model", "nixl")
        manager.kv_args.num_draft_entries = 0
        manager.defer_decode_allocation = True
        refused(lambda: sglang_kv.check_supported(manager), "prefill_complete", "early")
        manager.defer_decode_allocation = False
        args = types.SimpleNamespace(**vars(manager.kv_args))
        args.kv_item_lens = [*args.kv_item_lens[:1], *(2 * n for n in args.kv_item_lens[1:])]
        refused(
            lambda: sglang_kv.sglang_cache(args, tp=1, rank=0, mla=False),
            "layers differ in their bytes a page",
        )
    store = os.environ.pop("MOE_P2P_KV_STORE")
    try:
        refused(sglang_kv.kv_store, "MOE_P2P_KV_STORE", "HOST:PORT")
    finally:
        os.environ["MOE_P2P_KV_STORE"] = store


if __name__ == "__main__":
    scenario.main(begin)
