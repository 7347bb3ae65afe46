"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_p2p import env
from moe_p2p.bench.harness import (
    DEVICE,
    Common,
    add_options,
    file,
    look_at_files,
    option,
    parsed,
    refuse,
)
from moe_p2p.engine.config import Wait
from moe_p2p.layer import products
from moe_p2p.machine.models import MODELS
from moe_p2p.machine.transport import PROVIDERS, SOFTWARE, TIMED
from moe_p2p.moe.layouts import NAMES, RowLayout
from moe_p2p.moe.options import PARTIALS, Partials, block_of
from moe_p2p.tools.gpu_timing import MAX_ROUNDS
from moe_p2p.tools.meeting import MIRROR_GPUS
from moe_p2p.tools.option_types import (
    Parser,
    above_zero,
    at_least_0,
    each_at_least_0,
    each_at_least_1,
    zero_or_more,
)

DType = Literal["bf16", "fp16", "fp32", "fp8"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SWEEP = tuple(1 << i for i in range(14))  # 1 to 8192
GBPS_OF_A_GPU = 400.0  # default rate of all NICs of a GPU between emulated nodes
NICS_OF_A_GPU = {"cx7": 1, "efa": 2}  # 400 Gbit/s together
AUTO = ("auto",)  # --gemm: all products of this machine


def _names(text: str) -> tuple[str, ...]:
    for name in (names := tuple(text.split(","))):
        if name not in ("default", "T") and not name.isdecimal():
            raise argparse.ArgumentTypeError(f"{name!r} is neither a number, default nor T")
    return names


def _routing(text: str) -> str:
    name, _, number = text.partition(":")
    if text in ("uniform", "skewed"):
        return text
    if name in ("zipf", "maxvio"):
        try:
            zero_or_more(number)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of uniform, skewed, zipf:S, maxvio:V")


def _products(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """One world of ranks. The defaults are for CPU ranks; `cuda` has those for GPUs."""

    ranks: int = option(4, "processes; with commas one run for each (4; all GPUs)",
                        type=each_at_least_1)
    ranks_per_node: int = option(2, "ranks of a node; commas: a run each (2; all)",
                                 type=each_at_least_1)
    tokens: tuple[int, ...] = option((1, 8, 32, 128), "per rank, with commas",
                                     cuda=(8, 32, 128, 4096))
    model: str = option("", "gives hidden, topk, experts and ffn", choices=list(MODELS))
    hidden: int = option(7168, "hidden size")
    topk: int = option(8, "experts per token")
    experts: int = option(64, "experts of all ranks", cuda=256)
    dtype: DType = option(  # noqa: RUF009  fp8: bf16 rows quantized by dispatch, combined in bf16
        "bf16", "type that is sent", cuda="fp8", choices=["bf16", "fp16", "fp32", "fp8"])
    combine_dtype: Partials | None = option(  # noqa: RUF009
        None, "what combine sends, instead of values of x's type (x's type)",
        choices=PARTIALS)
    routing: str = option(
        "uniform", "how experts are chosen: uniform; zipf:S: the n-th most popular n^-S times as "
        "often; skewed: zipf:1; maxvio:V: so that the busiest has 1 + V times the mean (uniform)",
        type=_routing, metavar="NAME")
    # A file of a recorded routing overrides topk, experts and routing.
    trace: str | None = option(None, "replay a routing that the demo recorded", metavar="FILE")
    checks: int = option(4, "steps compared with the reference, per token count (4)",
                         type=at_least_0)
    seconds: float = option(
        6.0, f"of timing per token count; on GPUs at most {MAX_ROUNDS} rounds (6; 0.5 for each "
        "measurement)", cuda=0.5, type=above_zero)
    nics: int = option(2, "NICs per rank (2)", type=at_least_0)  # 0: the nearest
    hosts: int = 1  # each with as many ranks; several need torchrun
    transport: str = option(
        "auto", "auto, or one by name; timed: nothing is copied between nodes, a model of a NIC's "
        "times releases what arrives (auto)", metavar="NAME")
    preset: str = option("cx7", "NIC that --transport timed models", choices=list(NICS_OF_A_GPU))
    # Link model of one NIC; 0: as fast as memory.
    gbps: float = option(0.0, "Gbit/s of a NIC, 0: not known (0; 400 / NICs)")
    latency_us: float = option(0.0, "link model: one way, microseconds")
    part_bytes: int | None = option(
        None, "least bytes of a part of a step's send, 0: no parts (as tuned, else by transport)",
        type=at_least_0)
    seed: int = option(0, "not 0: software NICs reorder writes at random, by this seed (0)",
                       type=at_least_0)
    wait: Wait = option(  # noqa: RUF009
        "sleep", "how ranks wait (sleep; spin where NICs are)", choices=["sleep", "yield", "spin"])
    check: bool = option(
        False, "correctness alone: a line for each layout, type, half, mask, fault; status 0 or 1")
    timeout_s: float = option(30.0, "deadline of every wait, seconds (30)", type=above_zero)
    api: str = option(
        "all_to_all", "the calls that are timed (all_to_all); experts: moves of experts between "
        "ranks, alone and beside pairs; kv: KV pages from prefill to decode; "
        "megatron: training steps of Megatron-Core's MoE layer; weights: from trainers to "
        "generators; these have options of their own (--api kv --help)",
        choices=["all_to_all", "deep_ep", "experts", "kv", "megatron", "weights"])
    deep_ep_module: str | None = option(None, "time this module's DeepEP calls too (none)",
                                        metavar="NAME")
    baseline: bool = option(
        True, "do not time torch.distributed.all_to_all_single beside moe_p2p",
        flag="--no-baseline")
    layer: str = option(
        "", "also time a layer: dispatch, experts, combine; a name gives its sizes",
        nargs="?", const="given", choices=["given", *MODELS])
    ffn: int = option(256, "width of an expert of the layer", cuda=2048)
    gemm: tuple[str, ...] = option(
        AUTO, "products of the layer, side by side: deep_gemm, torch, triton, MODULE:FUNCTION; "
        "CPU ranks have torch (auto: all that this machine has)", type=_products, metavar="NAMES")
    json: str | None = file("bench.json", "figures")
    plot: str | None = file("bench.png", "PNG")

    # --- of GPUs only ---
    # chunk_tokens: "default", "T" (one chunk) or a number
    chunks: tuple[str, ...] = option(
        ("default",), "tokens of a step: numbers, default, T (default,T)", cuda=("default", "T"),
        flag="--chunk-tokens", gpu=True, type=_names)
    sms: tuple[int, ...] = option((0,), "multiprocessors a call may use, 0: all (0)",
                                  flag="--num-sms", gpu=True, type=each_at_least_0)
    layout: RowLayout | Literal["auto"] = option(  # noqa: RUF009
        "auto", "auto: padded up to 512 tokens, grouped above (auto)", gpu=True,
        choices=["auto", *NAMES])
    flush: bool = option(
        False, "empty the GPU's caches before dispatch and combine are timed by themselves",
        gpu=True)
    halves: bool = option(
        False, "also time send and receive of dispatch and combine, each by itself", gpu=True)
    # GPUs, each rank 0 of a mirror world of `ranks`; 0: a GPU for each rank.
    mirror: int = option(
        0, "measure rank 0 of W ranks on two GPUs, or one that is its own partner (no)", gpu=True,
        metavar="W")
    overlap: tuple[int, ...] = option(
        (), "also layers whose combine sends while the last product runs, on so many "
        "multiprocessors (none)", gpu=True, metavar="SMS")
    # fmt: on

    @property
    def processes(self) -> int:
        return self.mirror or self.ranks

    @property
    def x_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "fp8" else TORCH_DTYPES[self.dtype]

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.dtype == "fp8" else self.x_dtype

    @property
    def quantize(self) -> bool:
        return self.dtype == "fp8"

    @property
    def transport_settings(self) -> str:
        if self.transport == TIMED:
            latency = f",latency_us={self.latency_us:g}" if self.latency_us else ""
            return f"preset={self.preset},gbps={self.gbps:g}{latency}"
        if self.seed:
            return f"seed={self.seed}"
        if (self.gbps or self.latency_us) and self.hosts == 1:
            return f"gbps={self.gbps:g},latency_us={self.latency_us:g}"
        return ""


# Both end within 30 s, start of the ranks included: on two cores, and on a host of GPUs.
QUICK = {"tokens": (8, 128), "checks": 3, "seconds": 3.5}
QUICK_ON_CUDA: dict[str, Any] = {"tokens": (8, 128), "checks": 2, "seconds": 0.2}
RANKS_OF_A_GPU = 2  # ranks of --check that share the only GPU
# For --check: the reference is slow, and every type and layout has its lines.
CHECK: dict[str, Any] = {"tokens": (16,), "hidden": 1024, "checks": 3, "timeout_s": 60.0}
# Default tokens of each of DeepEP's interfaces, and the rest of such a run.
INTERFACES = {"low-latency": (8, 32), "normal": (64,), "v2": (32,)}
INTERFACES_ON_CUDA = {"low-latency": (8, 32, 128), "normal": (512, 4096), "v2": (128,)}
DEEP_EP: dict[str, Any] = {
    "tokens": (),
    "dtype": "fp8",
    "json": "bench_out/deep_ep.json",
    "plot": "bench_out/deep_ep.png",
}


def parse(arguments: list[str], *, prog: str = "") -> list[Options]:
    """Returns one for each requested world. Exits with a message for wrong input, as argparse.

    prog: whose options these are, for such a message; empty: the bench's.
    """
    parser = _parser()
    parser.prog = prog or parser.prog
    base, given = parsed(parser, Options, arguments)
    quick, sweep, check = given.pop("quick"), given.pop("sweep"), given.get("check", False)
    on_cuda = given["device"] == "cuda"
    if not on_cuda:
        base["layout"] = "grouped"
        refuse(parser, {f"{_flag(name)} is for GPUs": name in given for name in GPU_ONLY})
    if quick:
        base |= QUICK_ON_CUDA if on_cuda else QUICK
    if given.get("api") == "deep_ep":
        base |= DEEP_EP
    if check:
        base |= CHECK
    if sweep:
        base["tokens"] = SWEEP
    if sizes := MODELS.get(given.get("model") or given.get("layer", "")):
        hidden, experts, topk, ffn = sizes
        base |= {"hidden": hidden, "experts": experts, "topk": topk, "ffn": ffn}
    if "mirror" in given:
        worlds = _mirrored(parser, base, given)
    else:
        machines = _machines(parser, base, given, given["device"])
        worlds = _worlds(parser, base, given, machines, check=check)
    options = [
        Options(**_completed(base | given | {"ranks": ranks, "ranks_per_node": local}, given))
        for ranks, local in worlds
    ]
    look_at_files(parser, base)  # those of --api deep_ep have other names
    for each in options:
        refuse(parser, _wrong_sizes(each) | _wrong_calls(each) | _wrong_links(each))
    return options


def _mirrored(
    parser: argparse.ArgumentParser, base: dict[str, Any], given: dict[str, Any]
) -> list[tuple[int, int]]:
    """Returns the only world of --mirror; sets how many GPUs play it."""
    ranks = given["mirror"]
    if ranks < 2:
        parser.error(f"--mirror {ranks}: a world of 2 ranks or more")
    refused = {"ranks", "ranks_per_node", "check", "deep_ep_module"} & given.keys()
    if refused or env.launched():
        name = _flag(min(refused)) if refused else "torchrun"
        parser.error(f"--mirror starts its own ranks of the package, alike: not with {name}")
    given["mirror"] = min(MIRROR_GPUS, torch.cuda.device_count())
    base["baseline"] = False  # other libraries need all ranks
    given["baseline"] = False
    return [(ranks, ranks)]


def _machines(
    parser: argparse.ArgumentParser, base: dict[str, Any], given: dict[str, Any], device: str
) -> int:
    """Returns this machine's GPUs, 0: ranks use CPUs. Sets torchrun's choices in base and given."""
    num_devices = torch.cuda.device_count() if device == "cuda" else 0
    if env.launched():
        ranks, local = env.world_size(), env.local_world_size()
        if given.setdefault("ranks", (ranks,)) != (ranks,):
            parser.error(f"--ranks: torchrun has started {ranks} ranks")
        if ranks % local:
            parser.error(
                f"torchrun has started {ranks} ranks, {local} of them here: start as many "
                "on each host"
            )
        base |= {"hosts": ranks // local, "ranks_per_node": local}
        if ranks > local:
            base["nics"] = 0
    elif num_devices:
        sharing = RANKS_OF_A_GPU if given.get("check") else 1
        base |= {"ranks": max(num_devices, sharing)}
    return num_devices


def _worlds(
    parser: argparse.ArgumentParser,
    base: dict[str, Any],
    given: dict[str, Any],
    num_devices: int,
    *,
    check: bool,
) -> list[tuple[int, int]]:
    """Returns (ranks, ranks per node) of each world.

    DeepEP's calls find the nodes by themselves: each host is one. --check has both extremes.
    """
    all_ranks = given.pop("ranks", (base["ranks"],))
    per_node = given.pop("ranks_per_node", None)
    one_node = given.get("api") == "deep_ep"
    if one_node and per_node:
        parser.error("--ranks-per-node: with --api deep_ep the ranks of a host are one node")
    worlds = []
    for ranks in all_ranks:
        local = ranks // base["hosts"]
        if num_devices and local > num_devices and not check:
            parser.error(
                f"--ranks {local} is more than the {num_devices} GPUs of this machine: figures of "
                "ranks that share one would be of its time slices (--check takes them)"
            )
        whole = one_node or num_devices > 0 or env.launched()
        wanted = per_node or ((local,) if whole else (base["ranks_per_node"],))
        if check and not per_node and not one_node:
            wanted = tuple(dict.fromkeys((local, *wanted, 1)))
        fitting = [(ranks, each) for each in wanted if local % each == 0]
        if not fitting:
            parser.error(
                f"--ranks {local} is not a multiple of --ranks-per-node "
                f"{', '.join(map(str, wanted))}; pass one that divides it"
            )
        worlds += fitting
    return worlds


def _completed(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for key in ("json", "plot", "trace"):
        base[key] = base[key] or None
    on_cuda, local = base["device"] == "cuda", base["ranks"] // base["hosts"]
    emulated = on_cuda and base["hosts"] == 1 and base["ranks_per_node"] < local
    if base.get("transport") == TIMED:
        if "nics" not in given:
            base["nics"] = NICS_OF_A_GPU[base["preset"]]
        if "gbps" not in given:
            base["gbps"] = GBPS_OF_A_GPU / NICS_OF_A_GPU[base["preset"]]
    elif emulated and not base["check"] and not given.keys() & {"gbps", "seed"}:
        base["gbps"] = GBPS_OF_A_GPU / base["nics"]
    if emulated and "wait" not in given:
        base["wait"] = "spin"  # the proxies have work, and cores: a GPU comes with several
    return base


FIELDS = Options.__dataclass_fields__
GPU_ONLY = [name for name, each in FIELDS.items() if each.metadata.get("gpu")]


def _flag(name: str) -> str:
    return FIELDS[name].metadata["flag"] or f"--{name.replace('_', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m moe_p2p bench",
        description="Correctness against the reference, then latency and bytes on the wire.",
        epilog="Defaults in parentheses: of CPU ranks, then of GPUs where they differ. Starts the "
        "ranks of this machine; between hosts torchrun does, with the same command on each: "
        "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST -m moe_p2p bench. "
        "MOE_P2P_TRANSPORT, MOE_P2P_TRANSPORT_SETTINGS and MOE_P2P_NICS choose the NICs.",
    )
    add = parser.add_argument
    devices = ["auto", "cpu", "cuda"]
    add("--device", choices=devices, default="auto", help=DEVICE)
    add("--quick", action="store_true", help="two token counts, within 30 s on two cores")
    add("--sweep", action="store_true", help="tokens 1 to 8192, powers of two, instead of --tokens")
    add_options(parser, Options, only=lambda each: each.name not in GPU_ONLY)
    gpu = parser.add_argument_group("GPUs only")
    add_options(gpu, Options, only=lambda each: each.name in GPU_ONLY)
    return parser


def _wrong_sizes(options: Options) -> dict[str, bool]:
    """What makes no sense, and whether it was asked for."""
    experts, drawn = options.experts, not options.trace
    most, (kind, _, number) = experts / options.topk - 1, options.routing.partition(":")
    row_bytes = options.hidden * options.wire_dtype.itemsize
    block = block_of(options.combine_dtype) if options.combine_dtype else 1
    return {
        f"--experts {experts} is not a multiple of --ranks {options.ranks}": drawn
        and experts % options.ranks > 0,
        f"--topk {options.topk} is more than --experts {experts}": drawn and options.topk > experts,
        f"--routing {options.routing}: MaxVio of {experts} experts and top-{options.topk} is below "
        f"{most:g}": drawn and kind == "maxvio" and float(number) >= max(most, 1e-9),
        f"--hidden {options.hidden}: a row of {options.dtype} is {row_bytes} bytes, must be a "
        "positive multiple of 16": row_bytes % 16 > 0,
        f"--combine-dtype {options.combine_dtype}: --hidden {options.hidden} must be a "
        f"multiple of {block}": options.hidden % block > 0,
    }


def _wrong_calls(options: Options) -> dict[str, bool]:
    through, module = options.api == "deep_ep", options.deep_ep_module
    return {
        **{f"--gemm {name}: {reason}": bool(reason) for name, reason in _lacking(options)},
        "--layer is of AllToAll's own calls: not with --api deep_ep": bool(options.layer)
        and through,
        "--overlap is of --layer": bool(options.overlap) and not options.layer,
        "--deep-ep-module is for --api deep_ep": module is not None and not through,
        f"--deep-ep-module: no module is named {module}": module is not None
        and not _is_there(module),
        f"--dtype {options.dtype}: DeepEP's calls take fp8 and bf16": through
        and options.dtype not in ("fp8", "bf16"),
        "--layer needs rows by expert: --layout padded or grouped": bool(options.layer)
        and options.layout == "by_rank",
        "--check is of AllToAll's own calls: not with --api deep_ep": options.check and through,
    }


def _lacking(options: Options) -> Iterator[tuple[str, str]]:
    """Yields each product by name, and what it lacks on this machine."""
    for name in options.gemm if options.layer and options.gemm != AUTO else ():
        module, _, function = name.partition(":")
        if name in products.MADE_OF:
            yield name, products.why_not(name, on_gpu=options.device == "cuda")
        else:
            known = function and _is_there(module)
            yield name, "" if known else f"no module {module} with a function behind ':'"


def _wrong_links(options: Options) -> dict[str, bool]:
    timed, seed, several = options.transport == TIMED, options.seed > 0, options.hosts > 1
    latency = options.latency_us > 0
    names = ("auto", *PROVIDERS, *SOFTWARE, "null")
    of_libfabric = (
        " (libfabric takes it by itself; another of its providers: --transport libfabric with "
        "MOE_P2P_TRANSPORT_SETTINGS=provider=tcp)"
    )
    return {
        f"--transport {options.transport} is none of {', '.join(names)}"
        + of_libfabric * (options.transport in ("efa", "tcp")): options.transport not in names,
        "--transport timed is for the ranks of one host, in order: no --seed": timed
        and (several or seed),
        "--preset is of --transport timed": not timed and options.preset != "cx7",
        "--seed, --latency-us are of the software NIC, which reaches one host": several
        and (seed or latency),
        "--seed reorders at will: it excludes the link model (--gbps, --latency-us)": seed
        and (options.gbps > 0 or latency),
    }


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no package above it; no name of a module
        return False
