"""The queues of SGLang's schedulers over our KV classes: PrefillBootstrapQueue, the calls of the
prefill scheduler that send and conclude, DecodePreallocQueue and DecodeTransferQueue, with SGLang's
requests, pools, allocators, cache and metadata buffers, on CPUs. test_sglang_kv.py runs them.

Stand-ins are the scheduler around them, which has no model, and the settings that a server
publishes.

    python -m tests.engines.sglang_queues_scenarios FILE [SCENARIO ...]
"""

from __future__ import annotations

import contextlib
import types
from array import array
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.engines import sglang_kv_scenarios
from tests.engines.scenarios import Scenarios, free_port
from tests.engines.sglang_kv_scenarios import DIM, HEADS, LAYERS, PAGE, SETTINGS, Stages

scenario = Scenarios()
TOKENS, SLOTS = 128, 8  # of a pool; of requests


def begin() -> None:
    sglang_kv_scenarios.begin()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from sglang.srt import runtime_context

    for name, fields in {
        "parallel": {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "dp_rank": 0},
        "serving": {"strip_thinking_cache": False},
        "disagg": {
            "disaggregation_enable_kv_checksum": False,
            "disaggregation_ib_device": "",
            "disaggregation_decode_enable_radix_cache": False,
            "disaggregation_decode_host_receive_threshold": 1,
            "optimistic_prefill_attempts": 0,
        },
        "device": {"gpu_id": 0},
        "memory": {"disable_radix_cache": True},
        "schedule": {"chunked_prefill_size": 8},
        "spec": {"speculative_algorithm": None},
    }.items():
        vars(SETTINGS.setdefault(name, types.SimpleNamespace())).update(fields)
    SETTINGS["parallel"].attn_tp_group = types.SimpleNamespace(cpu_group=dist.group.WORLD)
    runtime_context._CONTEXT._config_bags = SETTINGS
    runtime_context._ROLE_NS_MODE = "off"
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation

    for module in (prefill, decode, schedule_batch, allocation):
        module.get_parallel = lambda: SETTINGS["parallel"]


class _Nothing:
    """Measures, and counts reasoning tokens, of which there are none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: contextlib.nullcontext()


def scheduler(mixin: type, port: int, layers: range = range(LAYERS)) -> Any:
    """What the queues ask of a scheduler. layers: of its pipeline stage."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    made: Any = types.new_class("OneScheduler", (mixin,))()
    pool = MHATokenToKVPool(
        TOKENS,
        PAGE,
        torch.bfloat16,
        HEADS,
        DIM,
        len(layers),
        "cpu",
        False,
        start_layer=layers.start,
        enable_alt_stream=False,
    )
    requests = ReqToTokenPool(SLOTS, 64, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", pool, False)
    cache = RadixCache(
        CacheInitParams(
            disable=True,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
        )
    )
    off = ("hisparse", "staging", "lora", "decode_hicache", "priority_scheduling", "overlap")
    vars(made).update({f"enable_{name}": False for name in off})
    model = types.SimpleNamespace(
        effective_logical_max_total_num_tokens=TOKENS, kv_cache_dtype_str="bfloat16"
    )
    vars(made).update(
        token_to_kv_pool=pool,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        tree_cache=cache,
        kv_shard_widening=1,
        rust_server=None,
        tp_worker=types.SimpleNamespace(model_runner=model, is_hybrid_swa=False),
        model_config=types.SimpleNamespace(
            num_hidden_layers=LAYERS, hf_text_config=None, get_total_num_kv_heads=lambda: HEADS
        ),
        server_args=types.SimpleNamespace(port=port),
        attn_cp_cpu_group=dist.group.WORLD,
        attn_tp_cpu_group=dist.group.WORLD,
        processed_tokens_counter=0,
        random_seed=0,
        waiting_queue=[],
        running_batch=types.SimpleNamespace(reqs=[]),
        last_batch=None,
        told=[],  # what users are told
        metrics_reporter=types.SimpleNamespace(enable_metrics=False),
        spec_algorithm=types.SimpleNamespace(is_none=lambda: True, is_eagle=lambda: False),
        scheduler_stage_metrics=_Nothing(),
        batch_result_processor=_Nothing(),
        disagg_metadata_buffers=utils.MetadataBuffers(SLOTS, 16, torch.bfloat16, 0),
        req_to_metadata_buffer_idx_allocator=utils.ReqToMetadataIdxAllocator(SLOTS),
        disagg_prefill_pending_chunk_rids=set(),
        disagg_prefill_inflight_queue=[],
        disagg_decode_prealloc_queue=None,
    )
    made._release_aborted_request = lambda request: None  # the scheduler's own books
    made.output_streamer = types.SimpleNamespace(
        stream_output=lambda requests, *_: made.told.extend(requests)
    )
    return made


class Servers:
    """A prefiller, whose schedulers are pipeline stages, and a decoder."""

    def __init__(self, stages: tuple[int, ...] = (LAYERS,)) -> None:
        from sglang.srt.disaggregation import decode, prefill, utils

        self.port = free_port()
        SETTINGS["disagg"].disaggregation_bootstrap_port = self.port
        self.bootstrap = sglang_kv_scenarios.kv_class("BOOTSTRAP_SERVER")("127.0.0.1", self.port)
        backend = utils.TransferBackend.MOONCAKE
        group, self.prefill = Stages(stages), list[Any]()
        for stage, layers in enumerate(stages):
            vars(SETTINGS["parallel"]).update(pp_rank=stage, pp_size=len(stages), pp_group=group)
            span = range(sum(stages[:stage]), sum(stages[:stage]) + layers)
            first = scheduler(prefill.SchedulerDisaggregationPrefillMixin, 30001, span)
            first.pp_group = group
            buffers = (first.req_to_metadata_buffer_idx_allocator, first.disagg_metadata_buffers)
            first.disagg_prefill_bootstrap_queue = prefill.PrefillBootstrapQueue(
                *(first.token_to_kv_pool, None, *buffers, 0, self.port, TOKENS, first),
                *(_Nothing(), backend),
            )
            self.prefill.append(first)
        vars(SETTINGS["parallel"]).update(pp_rank=0, pp_size=1, pp_group=None)
        other = self.decode = scheduler(decode.SchedulerDisaggregationDecodeMixin, 30002)
        buffers = (other.req_to_metadata_buffer_idx_allocator, other.disagg_metadata_buffers)
        self.transferring = decode.DecodeTransferQueue(*buffers, other, other.tree_cache)
        self.preallocating = other.disagg_decode_prealloc_queue = decode.DecodePreallocQueue(
            other.req_to_token_pool,
            other.token_to_kv_pool_allocator,
            None,
            *buffers,
            other,
            self.transferring,
            other.tree_cache,
            0,
            self.port,
            TOKENS,
            4,
            backend,
        )

    def close(self) -> None:
        self.preallocating.kv_manager.teardown()
        for stage in self.prefill:
            stage.disagg_prefill_bootstrap_queue.kv_manager.teardown()
        self.bootstrap.close()

    def pair(self, room: int, length: int) -> tuple[list[Any], Any]:
        """A request at all schedulers, in the first queue of each."""
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        *ours, theirs = (
            Req(
                f"request {room}",
                "",
                array("q", range(length)),
                SamplingParams(max_new_tokens=4),
                bootstrap_host="127.0.0.1",
                bootstrap_port=self.port,
                bootstrap_room=room,
                disagg_mode=mode,
            )
            for mode in (
                *[DisaggregationMode.PREFILL] * len(self.prefill),
                DisaggregationMode.DECODE,
            )
        )
        for stage, one in zip(self.prefill, ours, strict=True):
            stage.disagg_prefill_bootstrap_queue.add(one, HEADS)
        self.preallocating.add(theirs)
        return ours, theirs

    def admit(self) -> None:
        """All schedulers turn until all stages of prefill may compute what waits."""
        found: list[Any] = []

        def turn() -> bool:
            ready, failed = self.preallocating.pop_preallocated()
            assert not failed
            self.transferring.extend(ready)
            assert not self.transferring.pop_transferred()
            for stage in self.prefill:
                found.extend(stage.disagg_prefill_bootstrap_queue.pop_bootstrapped())
            assert len(found) in (0, len(self.prefill))
            return bool(found)

        sglang_kv_scenarios.wait(turn)

    def compute(self, requests: list[Any], end: int) -> None:
        """A forward pass of prefill up to a token, as far as its pages are concerned."""
        for stage, request in zip(self.prefill, requests, strict=True):
            self._compute(stage, request, end)

    def _compute(self, server: Any, request: Any, end: int) -> None:
        length = len(request.origin_input_ids)
        if not request.kv.holds_kv:
            server.req_to_token_pool.alloc([request])
        begin, last = (-(-each // PAGE) * PAGE for each in (request.kv.kv_allocated_len, end))
        taken = server.token_to_kv_pool_allocator.alloc(last - begin)
        row = (request.kv.req_pool_idx, slice(begin, last))
        server.req_to_token_pool.write(row, taken.int())
        request.kv.kv_allocated_len = end
        at = rows(server, request)[:end]
        first = server.token_to_kv_pool.start_layer
        for number, buffer in enumerate(buffers_of(server), first):
            token = torch.arange(end)[:, None, None]
            buffer[at] = (token + 16 * number + request.bootstrap_room).bfloat16()
        request.extend_end = request.kv.kv_committed_len = end
        if end < length:
            server.send_kv_chunk(request)
            return
        is_last = server is self.prefill[-1]
        request.output_ids.append(77 + request.bootstrap_room if is_last else 0)
        server.disagg_prefill_inflight_queue.append(request)
        server.send_kv_chunk(request, last_chunk=True)

    def turn(self) -> tuple[list[Any], list[Any]]:
        """Requests that are complete at prefill, and at decode."""
        done = [each for stage in self.prefill
                for each in stage.process_disagg_prefill_inflight_queue()]  # fmt: skip
        got = self.transferring.pop_transferred()
        self.transferring.resolve_deferred_releases()
        return done, got


def rows(server: Any, request: Any) -> torch.Tensor:
    found = server.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
    return found[: len(request.origin_input_ids)].long()


def buffers_of(server: Any) -> list[torch.Tensor]:
    return [*server.token_to_kv_pool.k_buffer, *server.token_to_kv_pool.v_buffer]


def halves(server: Any) -> list[torch.Tensor]:
    """K and V, [layers, tokens, heads, DIM]."""
    pool = server.token_to_kv_pool
    return [torch.stack(each) for each in (pool.k_buffer, pool.v_buffer)]


@contextlib.contextmanager
def servers(*given: Any) -> Iterator[Servers]:
    made = Servers(*given)
    for each in (*made.prefill, made.decode):
        each.kv_checksum_computer = None
    try:
        yield made
    finally:
        made.close()


def transfer(made: Servers, room: int, *ends: int) -> None:
    ours, theirs = made.pair(room, ends[-1])
    free = [each.token_to_kv_pool_allocator.available_size() for each in made.prefill]
    made.admit()
    for end in ends:
        made.compute(ours, end)
    found_at = zip(made.prefill, ours, strict=True)
    sent = [[half[:, rows(stage, one)] for half in halves(stage)] for stage, one in found_at]
    done: list[Any] = []
    got: list[Any] = []

    def complete() -> bool:
        for found, more in zip((done, got), made.turn(), strict=True):
            found.extend(more)
        return len(done) == len(ours) and bool(got)

    sglang_kv_scenarios.wait(complete)
    assert (sorted(done, key=ours.index), got) == (ours, [theirs])
    assert list(theirs.output_ids) == [77 + room]
    for half, *wanted in zip(halves(made.decode), *sent, strict=True):
        assert torch.equal(half[:, rows(made.decode, theirs)], torch.cat(wanted))
    assert [each.token_to_kv_pool_allocator.available_size() for each in made.prefill] == free
    assert [each.told[-1] for each in made.prefill] == ours


@scenario
def chunks_through_both_schedulers_queues() -> None:
    with servers() as made:
        transfer(made, 5, 8, 16, 19)
        transfer(made, 6, 3)
        assert made.preallocating.queue == made.transferring.queue == []
        assert made.prefill[0].disagg_prefill_bootstrap_queue.queue == []


@scenario
def pipeline_stages_begin_when_the_first_one_says_so() -> None:
    """SGLang's first stage decides by what PPConsensusStore says of the others."""
    with servers((2, 1)) as made:
        transfer(made, 9, 8, 19)
        transfer(made, 10, 3)


@scenario
def prefill_fails_between_chunks_and_decodes_pages_come_back() -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    with servers() as made:
        free = made.decode.token_to_kv_pool_allocator.available_size()
        ours, theirs = made.pair(7, 19)
        made.admit()
        assert made.decode.token_to_kv_pool_allocator.available_size() < free
        made.compute(ours, 8)
        ours[0].disagg_kv_sender.abort()
        sglang_kv_scenarios.wait(lambda: (made.turn(), not made.transferring.queue)[1])
        assert isinstance(theirs.finished_reason, FINISH_ABORT)
        assert made.decode.told == [theirs]
        sglang_kv_scenarios.wait(
            lambda: (made.turn(), not made.transferring.has_pending_deferred_releases())[1]
        )
        assert made.decode.token_to_kv_pool_allocator.available_size() == free
        made.prefill[0].disagg_prefill_inflight_queue.extend(ours)
        sglang_kv_scenarios.wait(lambda: made.turn()[0] == ours)
        assert isinstance(ours[0].finished_reason, FINISH_ABORT)
        transfer(made, 8, 8, 12)


if __name__ == "__main__":
    scenario.main(begin)
