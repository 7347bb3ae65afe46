"""The benchmark on GPUs without the device: options, a whole run.

The run has ranks on CPUs where GPUs belong and a clock in place of events, so that everything else
is what runs on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p.bench import (
    cases,
    check,
    clocks,
    contestants,
    floors,
    gpu_calls,
    gpu_last,
    gpu_layer,
    gpu_measure,
    options,
    report,
    systems,
    worker,
)
from moe_p2p.bench.baseline import TorchAllToAll
from moe_p2p.bench.cases import make_job
from moe_p2p.bench.gpu_last import Inputs
from moe_p2p.bench.options import Options
from moe_p2p.bench.report import HALVES, Machine
from moe_p2p.layer.products import Products, TorchProducts
from moe_p2p.machine.models import MODELS
from moe_p2p.moe import reference
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.tools import gpu_timing, launch, meeting
from moe_p2p.tools.probe import Links

LINKS = Links(push_gbs=300.0, push_24_gbs=250.0, flag_us=2.0, pinned_us=3.0, relayed_us=4.0)
MACHINE = Machine(
    device="a clock", driver="13.0", torch=torch.__version__, nccl="none", memory_gbs=3_000.0
)
TINY = Options(
    device="cuda", ranks=2, ranks_per_node=2, tokens=(6,), hidden=256, topk=2, experts=4,
    checks=2, seconds=0.01, chunks=("default", "T"), sms=(0,),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_closed_form_is_the_reference(dtype: Any) -> None:
    given = replace(TINY, dtype=dtype)
    job = cases.make_job(given)
    tokens = job.tokens(0, [6, 5])
    for rank in range(2):
        expected = check.expect(job, given, rank, tokens)
        found = check.verify_sums("sums", job, given, tokens=tokens[rank], got=expected.out)
        assert found == []
        expected.out[3, 7] += 1
        (wrong,) = check.verify_sums("sums", job, given, tokens=tokens[rank], got=expected.out)
        assert "1 values beyond rounding, first in row 3 at 7" in wrong


# --- options ---


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_taken_where_there_are_any() -> None:
    (found,) = options.parse([])
    assert (found.device, found.ranks, found.ranks_per_node) == ("cuda", 4, 4)
    assert (found.dtype, found.experts, found.transport_settings) == ("fp8", 256, "")
    (found,) = options.parse(["--device", "cpu"])
    assert (found.device, found.ranks_per_node, found.dtype) == ("cpu", 2, "bf16")


@pytest.mark.usefixtures("four_gpus")
def test_emulated_nodes_share_the_rate_of_a_gpu() -> None:
    found = options.parse(["--ranks=2,4", "--ranks-per-node=4,2,1", "--nics=4"])
    worlds = [(o.ranks, o.ranks_per_node, o.gbps) for o in found]
    assert worlds == [(2, 2, 0), (2, 1, 100), (4, 4, 0), (4, 2, 100), (4, 1, 100)]
    assert options.parse(["--ranks-per-node=2", "--gbps=0"])[0].gbps == 0
    assert options.parse(["--ranks-per-node=2", "--seed=3"])[0].transport_settings == "seed=3"


@pytest.mark.usefixtures("four_gpus")
def test_layers_have_names() -> None:
    (found,) = options.parse(["--layer", "--topk", "4"])
    assert (found.layer, found.hidden, found.topk, found.ffn) == ("given", 7168, 4, 2048)
    (found,) = options.parse(["--layer", "deepseek-v4-pro", "--tokens", "8"])
    assert (found.hidden, found.topk, found.experts, found.ffn) == (7168, 6, 384, 3072)
    (note,) = gpu_layer.published(found)
    assert "layer deepseek-v4-pro at T 8 in 637.0 us" in note
    assert gpu_layer.PUBLISHED_US.keys() <= MODELS.keys()
    (found,) = options.parse(["--layer", "deepseek-v3", "--gemm", "torch,triton", "--tokens=9"])
    assert (found.layer, found.gemm) == ("deepseek-v3", ("torch", "triton"))
    assert gpu_layer.published(found) == []
    (found,) = options.parse(["--layer", "kimi-k3", "--overlap=8,24"])
    assert (found.gemm, found.overlap, found.experts) == (options.AUTO, (8, 24), 896)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layer", "--gemm", "nowhere:make"], "--gemm nowhere:make: no module nowhere"),
        (["--layer", "--gemm", "torch:"], "--gemm torch:: no module torch with a function"),
        (["--layer", "--gemm", "torch,deep_gemm"], "--gemm deep_gemm: no module is named deep_g"),
        (["--layer", "--api=deep_ep"], "--layer is of AllToAll's own calls"),
        (["--overlap=8"], "--overlap is of --layer"),
        (["--ranks", "8"], "--ranks 8 is more than the 4 GPUs"),
        (["--ranks-per-node", "3"], "--ranks 4 is not a multiple of --ranks-per-node 3"),
        (["--chunk-tokens", "half"], "'half' is neither a number, default nor T"),
        (["--layer", "--layout=by_rank"], "--layer needs rows by expert"),
    ],
)
def test_names_what_does_not_fit_the_machine(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert text in capsys.readouterr().err


def test_forms_of_a_call_come_once() -> None:
    base = replace(TINY, chunks=("default", "T", "64"), sms=(0, 24))
    assert contestants.forms(replace(base, tokens=(32,))) == [(32, 0), (32, 24)]
    chunks = [chunk for chunk, _ in contestants.forms(replace(base, tokens=(4096,), sms=(0,)))]
    assert chunks == [512, 4096, 64]


# --- a whole run ---


class Events:
    """torch.cuda as gpu_timing uses it, by the host's clock."""

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) * 1e3

    @staticmethod
    def _sleep(_: int) -> None:
        pass

    @staticmethod
    def synchronize() -> None:
        pass


class Meeting:
    """Probe without links."""

    def __init__(self, *, timeout_s: float, group: dist.ProcessGroup | None) -> None:
        assert timeout_s > 0
        assert group is None  # all ranks are of one host

    barrier = staticmethod(dist.barrier)

    def links(self) -> Links:
        return LINKS

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def scaled_by(factor: int) -> Any:
    """Experts of a layer."""

    def experts(x: torch.Tensor, scales: torch.Tensor | None, _: torch.Tensor) -> torch.Tensor:
        rows = x.float() if scales is None else reference.dequantize(x, scales)
        return (rows.nan_to_num() * factor).bfloat16()

    return experts


class Threaded(TorchProducts):
    """Its last product begins with its room, in a thread, and ends where others begin theirs."""

    layout = None

    def unready(self, hidden: Any, num_sms: int) -> tuple[torch.Tensor, ReadyRows]:
        y, ready = super().unready(hidden, num_sms)
        product = functools.partial(super().down_into, y, hidden, y, 1, ready)
        self.writing = threading.Thread(target=product)
        self.writing.start()
        return y, ready

    def down_into(self, *_: Any) -> None:
        self.writing.join()


def parts_of(options: Options) -> gpu_layer.LayerParts:
    """Experts that all answer alike, and ones of small weights with overlap."""
    same = gpu_layer.Whole(scaled_by(options.ffn))
    found: dict[str, Products] = {"same": same}
    reference: Products = same
    if options.overlap:
        count, hidden = options.experts // options.ranks, options.hidden
        shapes = (hidden, options.ffn), (hidden, options.ffn), (options.ffn, hidden)
        torch.manual_seed(0)
        weights = [torch.randn(count, *shape).mul_(shape[0] ** -0.5) for shape in shapes]
        weights = [weight.bfloat16() for weight in weights]
        found = {"threaded": Threaded(*weights)}
        reference = gpu_layer.Whole(gpu_layer.plain_experts(*weights))
    return gpu_layer.LayerParts(
        products=found, reference=reference, mean=1.0, weight_bytes=30_000_000
    )


class Stream:
    """torch.cuda.Stream where nothing is queued."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


def made_on_cpus(make: Any, options: Options, *args: Any, **kwargs: Any) -> Any:
    return make(replace(options, device="cpu"), *args, **kwargs)


def run_by_the_clock(given: Options) -> worker.Results:
    patch = pytest.MonkeyPatch()
    nothing: Any = lambda *_: None  # noqa: E731
    new_group = dist.new_group
    patch.setattr(gpu_timing, "cuda", Events)
    patch.setattr(meeting, "Probe", Meeting)
    patch.setattr(launch, "device_index", lambda: 0)
    on_cpu = functools.partial(made_on_cpus, systems.make_config)
    for module in (systems, contestants):
        patch.setattr(module, "make_config", on_cpu)
    for module in (worker, contestants):
        patch.setattr(module, "on_device", lambda tokens, _: tokens)
    patch.setattr(contestants, "TorchAllToAll", functools.partial(made_on_cpus, TorchAllToAll))
    patch.setattr(Machine, "here", staticmethod(lambda **_: MACHINE))
    patch.setattr(dist, "new_group", lambda backend: new_group(backend="gloo"))
    patch.setattr(torch.cuda, "set_device", nothing)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "synchronize", nothing)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    device = type("Device", (), {"total_memory": 1 << 40})
    patch.setattr(torch.cuda, "get_device_properties", lambda _: device)

    def unrolled(run: Any, *, repeats: int) -> Any:
        return lambda: [run() for _ in range(repeats)]

    patch.setattr(gpu_measure, "captured", unrolled)
    patch.setattr(worker, "make_parts", lambda options, *_: parts_of(options))
    return worker.run(given)


def the_run(given: Options) -> worker.Results:
    results: worker.Results = launch.run_ranks(run_by_the_clock, given, num_ranks=given.ranks)[0]
    return results


def test_a_run_checks_and_times_everything() -> None:
    given = replace(TINY, tokens=(3, 6), chunks=("default", "4"), dtype="fp8")
    results = the_run(given)
    assert [note for note in results.notes if "DeepEP" not in note] == []
    seen = {(row.system, row.tokens, row.chunk_tokens, row.what) for row in results.rows}
    ways = ("pair graph", "pair eager", "dispatch", "combine")
    assert seen == {
        *(("moe_p2p", tokens, chunk, way) for tokens, chunk in ((3, 3), (6, 6), (6, 4))
          for way in ways),
        *(("torch", tokens, 0, way) for tokens in (3, 6) for way in ways[1:]),
    }  # fmt: skip
    for row in results.rows:
        assert (row.host_us is not None) == (row.what == "pair eager")
        assert row.correct, row.wrong
        assert "after timing" in row.compared
        assert 0 < row.spread.min_us <= row.spread.p50_us <= row.spread.p99_us
        assert row.nvlink_bytes > 0
        assert row.wire_bytes in (None, 0)
        assert row.rounds >= gpu_timing.MIN_ROUNDS
    text = report.table(results.rows)
    assert len(text.splitlines()) == 1 + 3 + 2
    assert "NO" not in text


def test_waits_are_no_work_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = waited = 0.0

    def run() -> None:  # 30 us of work, and waits that differ
        nonlocal now, waited
        now += 30e-6 + waited / 2 + 1e-3
        waited += waited / 2 + 1e-3

    monkeypatch.setattr(gpu_timing, "cuda", Events)
    monkeypatch.setattr(gpu_timing, "agreed_max", lambda value: value)
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: now)
    worked = gpu_timing.host_us(run, lambda: waited, lambda: None, repeats=2)
    assert worked == pytest.approx(30.0)


def with_replays_that_do_nothing(given: Options) -> worker.Results:
    """As those of a broken communicator: every kernel of theirs ends at once."""
    patch = pytest.MonkeyPatch()
    idle: Any = lambda run, *, repeats: lambda: None  # noqa: E731
    real = gpu_measure.measure

    def measure(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(gpu_measure, "captured", idle)
        return real(*args, **kwargs)

    patch.setattr(clocks, "measure", measure)
    return run_by_the_clock(given)


def test_results_of_the_last_replay_are_compared() -> None:
    given = replace(TINY, chunks=("T",))
    rows = launch.run_ranks(with_replays_that_do_nothing, given, num_ranks=2)[0].rows
    ours = [row for row in rows if row.system == "moe_p2p"]
    assert not any(row.correct for row in ours)
    reported = {text.split(", ", 3)[3] for row in ours for text in row.wrong}
    assert "rows are not those of an eager call" in reported
    assert any("values beyond rounding" in text for text in reported)
    assert all("pair graph" in text for row in ours for text in row.wrong)
    assert all(row.correct for row in rows if row.system == "torch")
    assert "NO" in report.table(rows)


def test_no_result_of_earlier_inputs_can_pass_for_one_of_the_last() -> None:
    tokens = make_job(TINY).tokens_of(0, 0, 6)
    inputs, before = Inputs(tokens), []
    for turn in (inputs.change, inputs.change, inputs.renew, inputs.change, inputs.renew):
        turn()
        assert inputs.tokens.topk_weights is not None
        now = inputs.tokens.x.clone(), inputs.tokens.topk_weights.clone()
        if turn == inputs.renew:
            assert not any(torch.equal(x, now[0]) or torch.equal(w, now[1]) for x, w in before)
        before.append(now)


def test_ranks_exchange_an_answer_without_the_rows_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs pickle wrote all rows, of each rank: two thirds of the time of `make bench`."""
    sent = list[Any]()
    monkeypatch.setattr(gpu_last, "everyones", lambda value: sent.append(value) or [value] * 2)
    given = replace(TINY, device="cpu")
    job = make_job(given)
    y = gpu_calls.answer_like(torch.zeros(100, 256), torch.bfloat16)
    calls = gpu_calls.Calls(
        system="any",
        dispatch=lambda: None,
        combine=lambda: None,
        capturable=False,
        last=lambda _: {"out": torch.zeros(6, 256), "answer": y[0]},
    )
    watch = gpu_last.Watch(job, given, 0, Inputs(job.tokens_of(0, 0, 6)))
    watch.look(calls, "pair eager", lambda: None)
    assert torch.equal(sent[-1], y[0])
    assert len(pickle.dumps(sent[-1])) < 2 * y[0].nbytes + 1000


def broken_at_rank_1(given: Options) -> worker.Results:
    patch = pytest.MonkeyPatch()
    real = contestants.package_calls

    def calls(*args: Any, **kwargs: Any) -> gpu_calls.Calls:
        broken = "a wrong" if dist.get_rank() == 1 else ""
        return replace(real(*args, **kwargs), broken=lambda: broken)

    patch.setattr(contestants, "package_calls", calls)
    return run_by_the_clock(given)


def test_a_communicator_that_broke_at_any_rank_is_not_correct() -> None:
    given = replace(TINY, chunks=("T",), baseline=False)
    rows = launch.run_ranks(broken_at_rank_1, given, num_ranks=2)[0].rows
    assert not any(row.correct for row in rows)
    assert any("pair graph, broken: a wrong" in text for text in rows[0].wrong)


@pytest.mark.parametrize("chunks", [("T",), ("2",)])
def test_a_run_over_nodes_counts_the_bytes(chunks: tuple[str, ...]) -> None:
    results = the_run(replace(TINY, ranks_per_node=1, chunks=chunks))
    assert any("no baselines" in note for note in results.notes)
    pairs = [row for row in results.rows if row.what == "pair graph"]
    assert [row.wrong for row in pairs] == [[]]
    assert pairs[0].wire_bytes == pairs[0].expected_wire_bytes > 0
    apart = [row.wire_bytes for row in results.rows if row.what in ("dispatch", "combine")]
    assert sum(sent or 0 for sent in apart) == pairs[0].wire_bytes


@pytest.mark.parametrize(
    ("ranks", "local", "more"),
    [(2, 1, {}), (2, 1, {"chunks": ("2",)}), (2, 1, {"part_bytes": 1}), (4, 2, {"part_bytes": 1})],
)
def test_a_run_over_nodes_counts_the_writes_of_the_protocol(
    ranks: int, local: int, more: dict[str, Any]
) -> None:
    """Each rank has a partner on each other node, each part is a write with an immediate a NIC."""
    usual: dict[str, Any] = {
        "ranks": ranks,
        "ranks_per_node": local,
        "chunks": ("T",),
        "baseline": False,
    }
    given = replace(TINY, **(usual | more))
    job = cases.make_job(given)
    routed = [job.routing(worker.TIMED_STEP, rank, 6)[0] for rank in range(ranks)]
    sent = floors.node_copies(routed, job.topology)
    away = [
        int(sent[rank, node])
        for rank in range(ranks)
        for node in range(ranks // local)
        if node != rank // local
    ]
    parts = [1] * len(away)
    if "part_bytes" in more:  # of two tokens of a step of six
        parts = [-(-max(count, 1) // 2) for count in away]
    if "chunks" in more:  # three steps, each phase with the empty half of another step
        parts = [6] * len(away)
    pairs = [row for row in the_run(given).rows if row.what.startswith("pair")]
    assert pairs
    for row in pairs:
        assert row.wire_writes == row.wire_immediates == 2 * row.nics * sum(parts)
        assert row.wire_fences == 0
        assert row.deepep_writes == 2 * floors.expert_copies(routed, job.topology)
        assert row.deepep_flags == 2 * ranks * given.experts // 2


def without_memory(given: Options) -> worker.Results:
    pytest.MonkeyPatch().setattr(contestants, "MEMORY_PART", 0)
    return run_by_the_clock(given)


def test_a_run_without_anything_to_measure_fails() -> None:
    text = "nothing to measure: .*T 6, chunk_tokens 6: left out, . MiB of regions"
    with pytest.raises(launch.RanksFailedError, match=text):
        launch.run_ranks(without_memory, TINY, num_ranks=2)


def test_a_run_times_the_layer() -> None:
    results = the_run(replace(TINY, layer="given", ffn=3, chunks=("T",)))
    seen = {(row.system, row.what) for row in results.rows if row.what.startswith("layer")}
    assert seen == {
        ("moe_p2p", "layer eager"),
        ("moe_p2p", "layer graph"),
        ("torch", "layer eager"),
    }
    assert [row.system for row in results.rows if row.what == "experts graph"] == ["moe_p2p"]
    assert all(row.correct for row in results.rows), [row.wrong for row in results.rows]
    heading, *lines = report.layers(results.rows).splitlines()
    assert all(name in heading for name in ("layer graph", "experts", "pair's share", "weights"))
    assert len(lines) == 2
    assert "10.0" in lines[0]  # us of 30 MB at 3,000 GB/s
    printed = report.text(results.rows, results.notes)
    assert report.layers(results.rows) in printed
    assert report.LAYER in printed


def test_a_run_times_layers_whose_combine_begins_before_the_experts_end() -> None:
    given = replace(TINY, layer="given", ffn=32, chunks=("T",), overlap=(2, 7), baseline=False)
    results = the_run(given)
    assert [row.wrong for row in results.rows if row.wrong] == []
    layers = {row.overlap_sms: row for row in results.rows if row.what == "layer graph"}
    assert layers.keys() == {0, 2, 7}
    assert {row.layout for sms, row in layers.items() if sms} == {"padded"}
    lines = report.layers(results.rows).splitlines()[1:]
    assert ["2 SMs" in line for line in lines] == [False, True, False]
    assert ["7 SMs" in line for line in lines] == [False, False, True]
    experts = [row for row in results.rows if row.what == "experts graph"]
    assert [row.overlap_sms for row in experts] == [0]  # which all of them are held against


def with_wrong_experts(given: Options) -> worker.Results:
    patch = pytest.MonkeyPatch()
    real = parts_of

    def parts(options: Options) -> gpu_layer.LayerParts:
        made = real(options)
        return replace(made, products={**made.products, "wrong": gpu_layer.Whole(scaled_by(2))})

    patch.setitem(globals(), "parts_of", parts)
    return run_by_the_clock(given)


def test_a_layer_is_compared_with_plain_products() -> None:
    given = replace(TINY, layer="given", ffn=3, chunks=("T",), baseline=False)
    rows = launch.run_ranks(with_wrong_experts, given, num_ranks=2)[0].rows
    (text,) = {text for row in rows for text in row.wrong}
    assert text == "moe_p2p, wrong: layer is 0.333 of its length away from plain products"


def test_the_pair_has_what_the_experts_leave_of_a_layer() -> None:
    assert report.pair_share(80.0, 50.0) == "38%"
    assert report.pair_share(80.0, None) is None


@pytest.mark.parametrize("layout", ["padded", "by_rank"])
def test_a_run_times_the_halves_of_calls_that_have_them(layout: Any) -> None:
    given = replace(TINY, halves=True, chunks=("T", "2"), baseline=False, layout=layout)
    results = the_run(given)
    assert {row.layout for row in results.rows} == {layout}
    seen = {(row.chunk_tokens, row.what): row for row in results.rows if row.what in HALVES}
    assert seen.keys() == {(6, what) for what in HALVES}  # chunks of 2: more steps than are open
    assert all(row.correct for row in results.rows)
    assert [seen[6, what].percent_of_push is None for what in HALVES] == [False, True] * 2
    whole, cut = report.table(results.rows).splitlines()[1:]
    assert cut.split().count("-") == whole.split().count("-") + len(HALVES)


def test_layers_that_differ_are_reported() -> None:
    def ours(value: float) -> contestants.Contestant:
        out = functools.partial(torch.full, (4,), value)
        layer = gpu_calls.Layer(gemm="x", layout="padded", run=out, out=out, overlap_sms=8)
        calls = gpu_calls.Calls(
            system=f"times {value}",
            dispatch=lambda: None,
            combine=lambda: None,
            capturable=False,
            layers=[layer],
            reference=lambda: torch.full((4,), 1.01),
        )
        return contestants.Contestant(calls=calls, wrong=[])

    away = "of its length away from plain products"
    for given, most in ((TINY, 1.1), (replace(TINY, dtype="fp8"), 1.05)):
        found = [ours(1.0), ours(most), ours(float("nan")), ours(1.01)]
        worker._compare_layers(found, given)
        wrong = [one.wrong for one in found]
        assert wrong[0] == wrong[3] == []
        assert wrong[2] == [f"times nan, x, overlap on 8: layer is nan {away}"]
        if given is TINY:
            assert wrong[1] == [f"times 1.1, x, overlap on 8: layer is 0.089 {away}"]
        else:  # two roundings to fp8 may lie in between
            assert wrong[1] == []
