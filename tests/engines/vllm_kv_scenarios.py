"""What two engines of vLLM do with MoeP2pConnector, each a function; test_vllm_kv.py runs them.

python -m tests.engines.vllm_kv_scenarios FILE    writes {scenario: error text} as JSON
"""

from __future__ import annotations

import dataclasses
import io
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.engines import vllm_kv_engine as engines
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused
from tests.engines.vllm_kv_engine import Engine, Model, kv_bytes
from tests.support.blocking_store import Blocking, check_steps, counted

scenario = Scenarios()
PROMPT = list(range(100, 122))  # five pages of 4 and a half


@contextmanager
def pair(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
) -> Iterator[tuple[Engine, Engine]]:
    store = f"127.0.0.1:{free_port()}"
    first = Engine(**{"role": "kv_producer", "store": store, **both, **(prefill or {})})
    of_second = {"role": "kv_consumer", "store": store, "verify": "always"}
    second = Engine(**{**of_second, **both, **(decode or {})})
    try:
        meet(first, second)
        yield first, second
    finally:
        second.close()
        first.close()


def meet(first: Engine, second: Engine) -> None:
    """Connecting is apart from requests."""
    for rank in second.ranks:
        rank.half.receiver.wait_for(first.name)
    for rank in first.ranks:
        rank.half.sender.wait_for(second.name)


def run(*all_engines: Engine, until: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not until():
        for engine in all_engines:
            engine.step()
        assert time.monotonic() < end, f"waited {HANG_S} s: " + "; ".join(
            f"{e.name}: {e.finished}, {e.computed[-4:]}" for e in all_engines
        )


def run_until_idle(*all_engines: Engine) -> None:
    """Every page is back."""
    run(
        *all_engines,
        until=lambda: all(
            e.free_blocks == e.idle and not e.scheduler.requests for e in all_engines
        ),
    )


def send(first: Engine, second: Engine, name: str, tokens: list[int], max_tokens: int = 2) -> None:
    """As NIXL's routers do: prefill with one token, then decode with what it answered."""
    first.add(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False})
    run(first, until=lambda: name in first.finished)
    second.add(f"{name} there", tokens, first.answers[name], max_tokens)
    run(first, second, until=lambda: f"{name} there" in second.finished)
    assert second.finished[f"{name} there"] == "length", second.finished


def send_at_once(first: Engine, second: Engine, name: str, tokens: list[int]) -> None:
    first.add(name, tokens, {"do_remote_decode": True, "transfer_id": f"{name} to both"})
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": first.name,
        "transfer_id": f"{name} to both",
    }
    second.add(f"{name} there", tokens, params, max_tokens=2)


def begin_first_chunk(first: Engine, second: Engine) -> None:
    send_at_once(first, second, "a", PROMPT)
    second.step()
    first.step()


def check_loaded(second: Engine, name: str, tokens: list[int]) -> None:
    """All but the last token, which vLLM computes to sample from; bytes were compared then."""
    assert second.checked[name] == len(tokens) - 1, second.checked
    begin = next(begin for request, begin, _ in second.computed if request == name)
    assert begin == len(tokens) - 1, second.computed


@scenario
def routers_of_nixl_work_unchanged() -> None:
    with pair() as (first, second):
        send(first, second, "a", PROMPT)
        check_loaded(second, "a there", PROMPT)
        keys = (
            "do_remote_prefill do_remote_decode remote_engine_id remote_block_ids remote_host "
            "remote_port remote_request_id tp_size"
        )
        assert set(keys.split()) <= set(first.answers["a"])
        run_until_idle(first, second)


def _whole_and_at_once(first: Engine, second: Engine, tokens: list[int]) -> None:
    """The prompt after it was computed, and its reverse while it is."""
    send(first, second, "a", tokens)
    check_loaded(second, "a there", tokens)
    send_at_once(first, second, "b", tokens[::-1])
    run(first, second, until=lambda: "b there" in second.finished)
    check_loaded(second, "b there", tokens[::-1])
    run_until_idle(first, second)


def _layouts(model: Model, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    with pair(prefill, decode, model=model) as (first, second):
        _whole_and_at_once(first, second, PROMPT)


@scenario
def two_ranks_to_one_with_larger_pages() -> None:
    _layouts(Model(), {"tp": 2}, {"tp": 1, "block": 8, "layout": "LBNHC"})


@scenario
def one_rank_to_two_from_packed_layers() -> None:
    _layouts(Model(heads=4), {"tp": 1, "layout": "BLHNC"}, {"tp": 2})


@scenario
def replicated_heads_and_layers_of_a_page_side_by_side() -> None:
    _layouts(Model(heads=2), {"tp": 4, "layout": "BLNHC"}, {"tp": 2, "layout": "BLHNC"})


@scenario
def pipeline_stages_send_their_layers() -> None:
    """vLLM deals three layers to two stages as two and one."""
    chunks = {"max_num_batched_tokens": 8}
    _layouts(Model(), {"tp": 2, "stages": (2, 1), **chunks}, {"tp": 1, "block": 8})
    _layouts(Model(layers=4), {"stages": (1, 2, 1), "layout": "BLHNC"}, {"tp": 2})


@scenario
def layers_of_a_chunk_arrive_before_the_next_chunk_is_computed() -> None:
    with pair({"max_num_batched_tokens": 8}) as (first, second):
        send_at_once(first, second, "a", PROMPT)
        second.step()  # allocates and opens
        first.step()  # tokens 0 to 8
        assert "a" not in first.finished
        rank = second.ranks[0]
        ids = second.scheduler.kv_cache_manager.get_block_ids("a there")[0]
        rank.blocks["a there"] = (list(ids),)

        def arrived() -> bool:
            for layer, tensor in rank.tensors.items():
                want = kv_bytes(int(layer.split(".")[2]), rank.heads, PROMPT[:8], 0)
                at, within = rank.places("a there", layer, 0, 8)
                if not torch.equal(tensor[at, :, within].view(torch.int16), want.view(torch.int16)):
                    return False
            return True

        run(second, until=arrived)
        assert not second.computed
        run(first, second, until=lambda: "a there" in second.finished)
        assert [span for _, *span in first.computed] == [[0, 8], [8, 16], [16, 22]]
        check_loaded(second, "a there", PROMPT)
        run_until_idle(first, second)


@scenario
def layers_of_a_replayed_graph_follow_it() -> None:
    with pair({"graphs": True, "max_num_batched_tokens": 8}) as (first, second):
        send_at_once(first, second, "a", PROMPT)
        run(first, second, until=lambda: "a there" in second.finished)
        check_loaded(second, "a there", PROMPT)
        run_until_idle(first, second)


@scenario
def prefix_hits_on_both_sides_send_the_suffix_only() -> None:
    with pair() as (first, second):
        send(first, second, "a", PROMPT)
        longer = PROMPT + list(range(300, 313))
        sent: list[int] = []
        worker = second.ranks[0].half.receiver
        reserve = worker.reserve
        worker.reserve = lambda *given, **more: (
            sent.append(more["begin"]),
            reserve(*given, **more),
        )[1]
        send(first, second, "b", longer)
        assert sent == [20], "five pages are in the decoder's cache"
        assert ("b", 20, 35) in first.computed, "and in the prefiller's"
        check_loaded(second, "b there", longer)
        run_until_idle(first, second)


@scenario
def sliding_windows_in_chunks() -> None:
    both = {"model": Model(layers=4, window=10)}
    with pair({"max_num_batched_tokens": 8}, **both) as (first, second):
        _whole_and_at_once(first, second, list(range(400, 445)))


@scenario
def prefill_is_preempted_and_its_pages_go_to_others() -> None:
    """Seven pages for two: the second one lacks some for its next chunk, and the first gets all."""
    small = {"max_num_batched_tokens": 8, "blocks": 8, "tp": 2}
    with pair(small, {"blocks": 64}) as (first, second):
        first.add("other", list(range(900, 914)), max_tokens=12)
        run(first, until=lambda: ("other", 14, 15) in first.computed)
        begin_first_chunk(first, second)
        rank = first.ranks[0]
        before = set(rank.blocks["a"][0])
        run(first, second, until=lambda: "other" in first.finished)
        assert before & set(rank.blocks["other"][0]), "its pages were overwritten"
        assert not second.computed
        run(first, second, until=lambda: "a there" in second.finished)
        assert [begin for name, begin, _ in first.computed if name == "a"].count(0) == 2
        check_loaded(second, "a there", PROMPT)
        run_until_idle(first, second)


@scenario
def prefill_waits_for_a_send_that_is_about_to_free_blocks() -> None:
    """Six of seven blocks are of a request that is being sent, one of another that needs more."""
    with pair({"blocks": 8}) as (first, second):
        connector, sender = first.scheduler.connector, first.ranks[0].half.sender
        other = first.add("other", [1, 2, 3], max_tokens=12)
        first.add("unopened", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "unopened" in first.finished)
        run(first, until=lambda: other.num_preemptions == 1)
        assert not connector.has_pending_block_frees(), "it may take open_s"
        second.add("unopened there", PROMPT, first.answers["unopened"])
        run(first, second, until=lambda: "other" in first.finished)
        run_until_idle(first, second)

        other = first.add("again", [4, 5, 6], max_tokens=12)
        sender.poll = lambda sending: False  # a slow link
        send_at_once(first, second, "a", list(range(300, 322)))
        second.step()
        run(first, second, until=connector.has_pending_block_frees)
        for _ in range(10):
            first.step()
        assert "again" not in first.finished
        assert other.num_preemptions == 0
        del sender.poll
        run(first, second, until=lambda: "again" in first.finished)
        assert other.num_preemptions == 0
        run(first, second, until=lambda: "a there" in second.finished)
        check_loaded(second, "a there", list(range(300, 322)))
        run_until_idle(first, second)
        assert not connector.has_pending_block_frees()


@scenario
def prefill_aborts_before_it_is_scheduled() -> None:
    with pair() as (first, second):
        send_at_once(first, second, "a", PROMPT)
        second.step()
        first.abort("a")
        run(first, second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "error"
        scenario.expect_logged("a to both#0", "aborted at the prefiller")
        run_until_idle(first, second)


@scenario
def prefill_aborts_between_chunks_and_decode_computes_the_prompt() -> None:
    policy = {"kv_load_failure_policy": "recompute"}
    with pair({"max_num_batched_tokens": 8}, policy) as (first, second):
        send(first, second, "c", PROMPT[:8])  # two pages in the decoder's cache
        begin_first_chunk(first, second)
        first.abort("a")
        run(first, second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "length"
        assert next(b for n, b, _ in second.computed if n == "a there") == 8, second.computed
        run_until_idle(first, second)


@scenario
def a_failed_load_of_several_groups_is_a_failed_request() -> None:
    both = {"model": Model(layers=4, window=10)}
    policy = {"kv_load_failure_policy": "recompute"}
    with pair({"max_num_batched_tokens": 8}, policy, **both) as (first, second):
        begin_first_chunk(first, second)
        first.abort("a")
        run(first, second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "length"
        assert second.checked["a there"] == 0
        run_until_idle(first, second)


@scenario
def decode_rejects_and_the_prefiller_has_its_pages_at_once() -> None:
    with pair() as (first, second):
        first.add("a", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "a" in first.finished)
        assert first.free_blocks < first.idle
        second.add("a there", PROMPT, first.answers["a"])
        second.abort("a there")  # before it was scheduled
        assert second.scheduler.has_requests(), "the worker has to hear of it"
        began = time.monotonic()
        run_until_idle(first, second)
        assert time.monotonic() - began < 20, "open_s is 480"


@scenario
def decode_aborts_while_layers_arrive() -> None:
    with pair({"max_num_batched_tokens": 8}) as (first, second):
        begin_first_chunk(first, second)
        second.abort("a there")
        assert second.free_blocks < second.idle, "a write may land in them"
        run(second, first, until=lambda: second.free_blocks == second.idle)
        run_until_idle(first, second)
        send(first, second, "b", PROMPT)  # the same pages
        check_loaded(second, "b there", PROMPT)
        run_until_idle(first, second)


@scenario
def blocks_come_back_after_the_fence_where_the_prefiller_does_not_answer() -> None:
    with pair({"max_num_batched_tokens": 8}, {"drain_s": 0.5}) as (first, second):
        worker = first.ranks[0].half.sender
        hears = worker.on_message
        worker.on_message = lambda to, told: None if told.kind == "cancel" else hears(to, told)
        begin_first_chunk(first, second)
        second.abort("a there")
        began = time.monotonic()
        run(second, until=lambda: second.free_blocks == second.idle)
        assert 0.4 < time.monotonic() - began < 20, "a write may land in them until drain_s"


@scenario
def nobody_opens_it() -> None:
    with pair({"open_s": 0.3}) as (first, second):
        first.add("a", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "a" in first.finished)
        assert first.free_blocks < first.idle
        run_until_idle(first)
        second.add("a there", PROMPT, first.answers["a"])
        run(first, second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "error"
        scenario.expect_logged("'a#0'", "phase open for any receiver")
        run_until_idle(second)


@scenario
def the_prefiller_ends_while_decode_waits() -> None:
    with pair({"max_num_batched_tokens": 8}) as (first, second):
        begin_first_chunk(first, second)
        for rank in first.ranks:
            rank.connector.shutdown()
        run(second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "error"
        scenario.expect_logged("'a to both#0'", f"{first.name}/0")  # gave up, or its lease is over
        run_until_idle(second)


@scenario
def figures_reach_the_log_and_prometheus() -> None:
    import pickle

    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    with pair({"tp": 2}) as (first, second):
        send(first, second, "a", PROMPT)
        send(first, second, "b", PROMPT[::-1])
        run_until_idle(first, second)
        second.step()
        whole = second.ranks[0].connector.build_kv_connector_stats()
        for stats in pickle.loads(pickle.dumps([*first.stats, *second.stats])):
            whole = whole.aggregate(stats)
        found = whole.reduce()
        nbytes = (
            2 * 22 * 3 * 2 * 2 * engines.HEAD_SIZE * 2
        )  # requests, tokens, layers, heads, K and V
        assert found["requests"] == 6, found  # two senders and a receiver of each
        assert found["failed"] == 0
        assert 2 * nbytes <= found["nbytes"] < 2 * nbytes + 10_000, found
        assert found["mean transfer ms"] > 0
        config = first.ranks[0].connector._vllm_config
        lines: list[str] = []
        logging = KVConnectorLogging(config.kv_transfer_config)
        logging.observe(whole.to_dict())
        logging.log(lambda text, values: lines.append(text % values))
        assert "requests=6" in lines[0], lines

        class Metric:
            def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
                self.name, self.value = name, 0.0
                metrics.append(self)

            def labels(self, *values: Any) -> Any:
                assert values == ("m", 0)
                return self

            def inc(self, value: float) -> None:
                self.value += value

        metrics: list[Metric] = []
        from prometheus_client import Counter, Gauge, Histogram

        prom = first.ranks[0].connector.build_prom_metrics(
            config,
            {Counter: Metric, Gauge: Metric, Histogram: Metric},
            ["model_name", "engine"],
            {0: ["m", 0]},
        )
        prom.observe(whole.to_dict(), 0)
        by_name = {metric.name: metric.value for metric in metrics}
        assert by_name["vllm:moe_p2p_kv_requests"] == 6
        assert by_name["vllm:moe_p2p_kv_bytes"] == found["nbytes"]
        assert by_name["vllm:moe_p2p_kv_transfer_seconds"] > 0


@scenario
def beside_another_connector_in_multi_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    files = types.SimpleNamespace(  # by its own name torch.load would ask safetensors
        load_file=lambda at: torch.load(io.BytesIO(Path(at).read_bytes())),
        save_file=lambda tensors, at: Path(at).write_bytes(saved(tensors)),
    )

    def saved(tensors: Any) -> bytes:
        torch.save(tensors, at := io.BytesIO())
        return at.getvalue()

    example_connector.safetensors = types.SimpleNamespace(torch=files)
    with ExitStack() as stack:
        disks = [stack.enter_context(TemporaryDirectory()) for _ in range(3)]
        both = pair({"disk_last": disks[0]}, {"disk_first": disks[1]})
        first, second = stack.enter_context(both)
        third = Engine("kv_consumer", first.store, verify="always", disk_last=disks[1])
        stack.callback(third.close)
        meet(first, third)
        config = first.scheduler.connector._vllm_config.kv_transfer_config
        connector = type(first.ranks[0].connector)
        assert connector.__name__ == "MultiConnector"
        assert (
            connector.get_required_kvcache_layout(first.scheduler.connector._vllm_config) == "LBHNC"
        )
        assert not connector.requires_piecewise_for_cudagraph(config.kv_connector_extra_config)

        send(first, second, "a", PROMPT)
        check_loaded(second, "a there", PROMPT)
        run_until_idle(first, second)
        for engine in (first, second):
            assert engine.scheduler.reset_prefix_cache()
        first.computed.clear()
        send(first, third, "b", PROMPT)  # prefill reads pages of its disk, and sends them on
        assert first.computed[0] == ("b", 20, 22)
        check_loaded(third, "b there", PROMPT)
        first.add("c", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "c" in first.finished)
        second.add("c there", PROMPT, first.answers["c"], max_tokens=2)
        run(second, until=lambda: "c there" in second.finished)
        assert second.checked["c there"] == 20, "from its disk, which comes first"
        run_until_idle(first, second, third)  # open_s is 480: it was declined

        send_at_once(first, third, "d", list(range(300, 322)))
        third.step()
        first.abort("d")
        run(first, third, until=lambda: "d there" in third.finished)
        assert third.finished["d there"] == "error"
        run_until_idle(first, second, third)
        lines: list[str] = []
        logging = KVConnectorLogging(config)
        for stats in first.stats:
            logging.observe(stats.to_dict())
        logging.log(lambda text, values: lines.append(text % values))
        assert "'requests': 3" in lines[0], lines


@scenario
def parameters_of_nobody_are_named_and_the_prompt_is_computed() -> None:
    with pair() as (first, second):
        second.add("x", PROMPT, {"do_remote_prefill": True, "remote_engine_id": None})
        run(second, until=lambda: "x" in second.finished)
        assert second.finished["x"] == "length"
        scenario.expect_logged("request x", "need remote_engine_id")
        run_until_idle(first, second)


@scenario
def engines_of_both_roles_send_to_each_other_and_on() -> None:
    roles = {"prefill": {"role": "kv_both"}, "decode": {"role": "kv_both", "tp": 2}}
    with pair(**roles) as (first, second):
        third = Engine("kv_consumer", first.store, verify="always")
        try:
            meet(second, first)
            meet(second, third)
            meet(first, first)
            send(first, second, "a", PROMPT)
            check_loaded(second, "a there", PROMPT)
            send_at_once(first, second, "b", PROMPT[::-1])
            send_at_once(second, first, "c", list(range(500, 522)))
            run(first, second, until=lambda: {"b there"} <= second.finished.keys())
            run(first, second, until=lambda: {"c there"} <= first.finished.keys())
            check_loaded(second, "b there", PROMPT[::-1])
            check_loaded(first, "c there", list(range(500, 522)))
            tokens = list(range(700, 722))  # the second loads them, and sends them on
            first.add("d", tokens, {"do_remote_decode": True})
            run(first, until=lambda: "d" in first.finished)
            second.add("d too", tokens, first.answers["d"] | {"do_remote_decode": True})
            run(first, second, until=lambda: "d too" in second.finished)
            third.add("d there", tokens, second.answers["d too"], max_tokens=2)
            run(second, third, until=lambda: "d there" in third.finished)
            check_loaded(second, "d too", tokens)
            check_loaded(third, "d there", tokens)
            send(first, first, "e", list(range(800, 822)))  # a router that picks one engine twice
            run_until_idle(first, second, third)
        finally:
            third.close()


@scenario
def an_aborted_request_of_both_roles_is_heard_of_on_both_sides() -> None:
    with pair({"role": "kv_both"}, {"role": "kv_both"}) as (first, second):
        meet(second, first)
        first.add("a", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "a" in first.finished)
        second.add("a too", PROMPT, first.answers["a"] | {"do_remote_decode": True})
        then = {"do_remote_prefill": True, "remote_engine_id": second.name, "transfer_id": "a"}
        first.add("a there", PROMPT[::-1], then)
        first.step()
        second.abort("a too")  # before it was scheduled
        run(first, second, until=lambda: "a there" in first.finished)
        scenario.expect_logged("'a#0'", "aborted at the prefiller")
        run_until_idle(first, second)


def _sleeps_while_layers_arrive(at: int) -> None:
    with pair({"max_num_batched_tokens": 8}) as both:
        first, second = both
        sleeps, other = both[at], both[1 - at]
        assert type(sleeps.ranks[0].connector).supports_sleep_mode(None)
        first.add("later", PROMPT, {"do_remote_decode": True})
        run(first, until=lambda: "later" in first.finished)
        begin_first_chunk(first, second)
        sleeps.sleep()
        sleeps.sleep()  # vLLM's words: idempotent
        for _ in range(3):  # later chunks of the prefiller would land in what is unmapped
            other.step()
        sleeps.wake_up()
        sleeps.wake_up()
        meet(first, second)
        run(first, second, until=lambda: "a there" in second.finished)
        assert second.finished["a there"] == "error"
        scenario.expect_logged("'a to both#0'", f"{first.name}/0")
        second.add("later there", PROMPT, first.answers["later"], max_tokens=2)
        run(first, second, until=lambda: "later there" in second.finished)
        if sleeps is first:  # its pages are gone
            assert second.finished["later there"] == "error"
            scenario.expect_logged("'later#0'", "the engine goes to sleep")
        else:
            check_loaded(second, "later there", PROMPT)
        send(first, second, "b", list(range(300, 322)))
        check_loaded(second, "b there", list(range(300, 322)))
        run_until_idle(first, second)


@scenario
def the_prefiller_sleeps_and_meets_its_decoder_again() -> None:
    _sleeps_while_layers_arrive(0)


@scenario
def the_decoder_sleeps_and_meets_its_prefiller_again() -> None:
    _sleeps_while_layers_arrive(1)


@scenario
def a_store_that_blocks_stops_no_step_and_no_request() -> None:
    from moe_p2p.integrations.kv import vllm as vllm_kv
    from moe_p2p.integrations.kv import worker as kv_worker

    store, join = Blocking(HashStore()), kv_worker.join_store
    kv_worker.join_store = lambda _: store
    try:
        with pair() as (first, second), counted(vllm_kv.Connector) as cost:
            send(first, second, "a", PROMPT)
            check_steps(cost, store, lambda: (first.step(), second.step()))
            send(first, second, "b", PROMPT[::-1])
            check_loaded(second, "b there", PROMPT[::-1])
            run_until_idle(first, second)
            store.go_on()
    finally:
        store.go_on()
        kv_worker.join_store = join


@scenario
def a_request_for_the_other_role_is_computed_here() -> None:
    with pair() as (first, second):
        params = {"do_remote_prefill": True, "remote_engine_id": second.name, "transfer_id": "a"}
        first.add("a", PROMPT, params)
        second.add("b", PROMPT, {"do_remote_decode": True})
        run(first, second, until=lambda: "a" in first.finished and "b" in second.finished)
        assert (first.finished["a"], second.finished["b"]) == ("length", "length")
        scenario.expect_logged("request a:", "kv_role is kv_producer", "kv_both")
        scenario.expect_logged("request b:", "kv_role is kv_consumer", "kv_both")
        run_until_idle(first, second)


@scenario
def what_is_not_carried_is_refused_by_name() -> None:
    from vllm.v1 import kv_cache_interface as kv

    from moe_p2p.integrations.kv import vllm_layout as vllm_kv_layout

    store = f"127.0.0.1:{free_port()}"

    refused(lambda: Engine("kv_producer", "nowhere"), "HOST:PORT")
    Engine("kv_producer", store, bidirectional_kv_xfer=True).close()
    scenario.expect_logged("does not know bidirectional_kv_xfer", "tail_s")
    config = engines.vllm_config(
        "kv_producer", "p", tp=1, rank=0, block=4, blocks=8, extra={"store": store}
    )
    caches = engines.cache_config(Model(), tp=1, block=4, blocks=8, layout="LBHNC")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        setattr(config.parallel_config, name, 2)
        refused(
            lambda: vllm_kv_layout.vllm_cache(config, caches, {}), f"{name}=2", "start vLLM with"
        )
        setattr(config.parallel_config, name, 1)
    both = {"prefill": {"role": "kv_both", "stages": (2, 1)}}
    refused(lambda: pair(**both).__enter__(), "pipeline_parallel_size=2", "decodes", "kv_producer")
    windows = {"model": Model(layers=4, window=10), "stages": (2, 2)}
    refused(lambda: pair(windows).__enter__(), "stage 0 of 2", "2 cache groups")
    apart = {name: torch.zeros(2, 8, 4, 8).transpose(0, 1) for name in Model().names(0)}
    refused(lambda: vllm_kv_layout.vllm_cache(config, caches, apart), "strides", "LBHNC")
    tensors = {name: torch.zeros(8, 2, 4, 8) for name in Model().names(0)}
    (group,) = caches.transfer_groups
    for on_host, states in ((True, 1), (False, 2)):
        group.host_resident = on_host
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, tokens_per_state=states)
        words = f"states of {states} tokens, or on the host", "NixlConnector"
        refused(lambda: vllm_kv_layout.vllm_cache(config, caches, tensors), *words)
    caches.kv_cache_groups[0].kv_cache_spec = kv.MambaSpec(
        block_size=4, shapes=((2,),), dtypes=(torch.float32,)
    )
    refused(
        lambda: vllm_kv_layout.vllm_cache(config, caches, tensors), "MambaSpec", "NixlConnector"
    )


@scenario
def an_abstract_method_that_nobody_knows_is_named() -> None:
    import abc

    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from moe_p2p.integrations.kv import vllm as vllm_kv

    class Newer(base.KVConnectorBase_V1):
        @abc.abstractmethod
        def teleport(self) -> None: ...

    known, base.KVConnectorBase_V1 = base.KVConnectorBase_V1, Newer
    vllm_kv._connector_class.cache_clear()
    try:
        refused(lambda: vllm_kv.MoeP2pConnector, "teleport", "docs/engines.md")
    finally:
        base.KVConnectorBase_V1 = known
        vllm_kv._connector_class.cache_clear()


if __name__ == "__main__":
    scenario.main(engines.begin)
