"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_p2p import env
from moe_p2p.engine.config import Wait
from moe_p2p.machine.transport import TIMED
from moe_p2p.moe.options import INT10_BLOCK, PARTIALS, Partials
from moe_p2p.tools.option_types import (
    above_zero,
    at_least_0,
    at_least_1,
    each_at_least_0,
    each_at_least_1,
    output_file,
    zero_or_more,
)

DType = Literal["bf16", "fp16", "fp32", "fp8"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SWEEP = tuple(1 << i for i in range(14))  # 1 to 8192


@dataclass(frozen=True, kw_only=True)
class Options:
    """One world of ranks. The defaults are for CPU ranks; ON_CUDA has the defaults for GPUs."""

    device: str = "cpu"
    ranks: int = 4
    ranks_per_node: int = 2
    tokens: tuple[int, ...] = (1, 8, 32, 128)  # per rank
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    dtype: DType = "bf16"  # fp8: bf16 rows quantized by dispatch, combined in bf16
    combine_dtype: Partials | None = None  # of combine's partial sums; None: x's
    routing: str = "uniform"  # or "skewed"
    trace: str | None = None  # file of a recorded routing; overrides topk, experts and routing
    checks: int = 4  # compared steps per token count
    seconds: float = 6.0  # of timing per token count
    nics: int = 2  # per rank; 0: the nearest
    hosts: int = 1  # each with as many ranks; several need torchrun
    transport: str = "auto"
    preset: str = "cx7"  # of the timed NIC
    gbps: float = 0.0  # link model of one NIC; 0: as fast as memory
    latency_us: float = 0.0
    part_bytes: int | None = None  # of the configuration
    seed: int = 0  # not 0: the software NIC reorders what it may
    wait: Wait = "sleep"
    timeout_s: float = 30.0
    baseline: bool = True
    check: bool = False  # correctness alone
    api: str = "all_to_all"  # or "deep_ep": through DeepEP's calls
    deep_ep_module: str | None = None  # another module with those calls, beside ours
    json: str | None = "bench_out/bench.json"
    plot: str | None = "bench_out/bench.png"
    # GPUs only
    chunks: tuple[str, ...] = ()  # chunk_tokens: "default", "T" (one chunk) or a number
    sms: tuple[int, ...] = ()  # num_sms; 0: all
    # auto: padded up to 512 tokens, grouped above
    layout: Literal["auto", "padded", "grouped", "by_rank"] = "auto"
    flush: bool = False  # clear the caches before each part that is measured apart
    layer: str = ""  # dispatch, experts and combine too: "given", or a name of LAYERS
    halves: bool = False  # of dispatch and combine, each by itself
    ffn: int = 2048  # width of an expert of the layer
    gemm: str = "auto"  # the layer's products (gpu_layer.experts_of)
    mirror: int = 0  # GPUs, each rank 0 of a mirror world of `ranks`; 0: a GPU for each rank

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
ON_CUDA: dict[str, Any] = {
    "device": "cuda",
    "tokens": (8, 32, 128, 4096),
    "experts": 256,
    "dtype": "fp8",
    "seconds": 0.5,
    "chunks": ("default", "T"),
    "sms": (0,),
}
ON_CPU: dict[str, Any] = {"chunks": ("default",), "sms": (0,), "layout": "grouped"}
# For --check: the reference is slow, and every type and layout has its lines.
CHECK: dict[str, Any] = {"tokens": (16,), "hidden": 1024, "checks": 3, "timeout_s": 60.0}
RANKS_OF_A_GPU = 2  # ranks of --check that share the only GPU
# Default tokens of each of DeepEP's interfaces, and the rest of such a run.
INTERFACES = {"low-latency": (8, 32), "normal": (64,), "v2": (32,)}
INTERFACES_ON_CUDA = {"low-latency": (8, 32, 128), "normal": (512, 4096), "v2": (128,)}
DEEP_EP: dict[str, Any] = {
    "tokens": (),
    "dtype": "fp8",
    "json": "bench_out/deep_ep.json",
    "plot": "bench_out/deep_ep.png",
}
GBPS_OF_A_GPU = 400.0  # default rate of all NICs of a GPU between emulated nodes
NICS_OF_A_GPU = {"cx7": 1, "efa": 2}  # 400 Gbit/s together
_CUDA_ONLY = {"chunks": "chunk-tokens", "sms": "num-sms"}  # fields, and their options
_CUDA_ONLY |= {
    name: name for name in ("layout", "flush", "layer", "halves", "ffn", "gemm", "mirror")
}
MIRROR_GPUS = 2  # most of a mirror world
# Layers with a name: hidden size, experts of a token, experts, width of an expert. Those of MegaMoE
# are in gpu_layer.PUBLISHED_US, with its figures.
LAYERS: dict[str, dict[str, int]] = {
    "deepseek-v3": {"hidden": 7168, "topk": 8, "experts": 256, "ffn": 2048},
    "mega-4096": {"hidden": 4096, "topk": 6, "experts": 256, "ffn": 2048},
    "mega-7168": {"hidden": 7168, "topk": 6, "experts": 384, "ffn": 3072},
}


def parse(arguments: list[str]) -> list[Options]:
    """Returns one for each requested world. Exits with a message for wrong input, as argparse."""
    parser = _parser()
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    quick, sweep, check = given.pop("quick"), given.pop("sweep"), given.get("check", False)
    device = given.pop("device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device cuda: torch {torch.__version__} finds no GPU; see python -m moe_p2p doctor"
        )
    base = vars(Options()) | ON_CPU | (ON_CUDA if device == "cuda" else {})
    through_deep_ep = given.get("api") == "deep_ep"
    if quick:
        base |= QUICK_ON_CUDA if device == "cuda" else QUICK
    if through_deep_ep:
        base |= DEEP_EP
    if check:
        base |= CHECK
    if sweep:
        base["tokens"] = SWEEP
    base |= LAYERS.get(given.get("layer", ""), {})
    for name in _CUDA_ONLY:
        if device == "cpu" and name in given:
            parser.error(f"--{_CUDA_ONLY[name]} is for GPUs")
    if "mirror" in given:
        worlds = _mirrored(parser, base, given)
    else:
        machines = _machines(parser, base, given, device)
        worlds = _worlds(parser, base, given, machines, check=check)
    options = [
        Options(**_completed(base | given | {"ranks": ranks, "ranks_per_node": local}, given))
        for ranks, local in worlds
    ]
    for each in options:
        _refuse_nonsense(parser, each)
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
        name = "torchrun" if not refused else f"--{min(refused).replace('_', '-')}"
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
                f"{', '.join(map(str, wanted))}"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p bench",
        description="Correctness against the reference, then latency and bytes on the wire.",
        epilog="Defaults in parentheses: of CPU ranks, then of GPUs where they differ. Starts the "
        "ranks of this machine; between hosts torchrun does, with the same command on each: "
        "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST -m moe_p2p bench. "
        "MOE_P2P_TRANSPORT, MOE_P2P_TRANSPORT_SETTINGS and MOE_P2P_NICS choose the NICs.",
    )
    add = parser.add_argument
    add(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if any (auto)"
    )
    add("--quick", action="store_true", help="two token counts, within 30 s on two cores")
    each = each_at_least_1
    add("--ranks", type=each, help="processes; with commas one run for each (4; all GPUs)")
    add("--ranks-per-node", type=each, help="ranks of a node; commas: a run each (2; all)")
    add("--tokens", type=each, help="per rank, with commas (1,8,32,128; 8,32,128,4096)")
    add("--sweep", action="store_true", help="tokens 1 to 8192, powers of two, instead of --tokens")
    add("--hidden", type=at_least_1, help="hidden size (7168)")
    add("--topk", type=at_least_1, help="experts per token (8)")
    add("--experts", type=at_least_1, help="experts of all ranks (64; 256)")
    add("--dtype", choices=["bf16", "fp16", "fp32", "fp8"], help="type that is sent (bf16; fp8)")
    kinds = "what combine sends, instead of values of x's type (x's type)"
    add("--combine-dtype", choices=PARTIALS, help=kinds)
    add("--routing", choices=["uniform", "skewed"], help="how experts are chosen (uniform)")
    add("--trace", metavar="FILE", help="replay a routing that the demo recorded")
    add("--checks", type=at_least_0, help="steps compared with the reference, per token count (4)")
    seconds = "of timing per token count (6; 0.5 for each measurement)"
    add("--seconds", type=above_zero, help=seconds)
    add("--nics", type=at_least_0, help="NICs per rank (2)")
    add(
        "--transport",
        metavar="NAME",
        help="auto, or one by name; timed: nothing is copied between nodes, a model of a NIC's "
        "times releases what arrives (auto)",
    )
    add("--preset", choices=list(NICS_OF_A_GPU), help="NIC that --transport timed models (cx7)")
    add("--gbps", type=zero_or_more, help="Gbit/s of a NIC, 0: not known (0; 400 / NICs)")
    add("--latency-us", type=zero_or_more, help="link model: one way, microseconds (0)")
    add(
        "--part-bytes",
        type=at_least_0,
        help="least bytes of a part of a step's send, 0: no parts (as tuned, else 2 MiB)",
    )
    seed = "not 0: software NICs reorder writes at random, by this seed (0)"
    add("--seed", type=at_least_0, help=seed)
    add(
        "--wait",
        choices=["sleep", "yield", "spin"],
        help="how ranks wait (sleep; spin where NICs are)",
    )
    add(
        "--check",
        action="store_const",
        const=True,
        help="correctness alone: a line for each layout, type, half, mask, fault; status 0 or 1",
    )
    add("--timeout-s", type=above_zero, help="deadline of every wait, seconds (30)")
    add(
        "--api",
        choices=["all_to_all", "deep_ep", "kv", "megatron", "weights"],
        help="the calls that are timed (all_to_all); kv: KV pages from prefill to decode; "
        "megatron: training steps of Megatron-Core's MoE layer; both have options of their own "
        "(--api kv --help)",
    )
    add("--deep-ep-module", metavar="NAME", help="time this module's DeepEP calls too (none)")
    add(
        "--no-baseline",
        dest="baseline",
        action="store_const",
        const=False,
        help="do not time torch.distributed.all_to_all_single beside moe_p2p",
    )
    files: dict[str, Any] = {"type": output_file, "metavar": "FILE"}
    add("--json", **files, help="figures (bench_out/bench.json, deep_ep.json; '': none)")
    add("--plot", **files, help="PNG (bench_out/bench.png, deep_ep.png; '': none)")
    gpu = parser.add_argument_group("GPUs only").add_argument
    gpu(
        "--chunk-tokens",
        dest="chunks",
        type=_names,
        help="tokens of a step: numbers, default, T (default,T)",
    )
    gpu(
        "--num-sms",
        dest="sms",
        type=each_at_least_0,
        help="multiprocessors a call may use, 0: all (0)",
    )
    layouts = ["auto", "padded", "grouped", "by_rank"]
    gpu("--layout", choices=layouts, help="auto: padded up to 512 tokens, grouped above (auto)")
    flush = "empty the GPU's caches before dispatch and combine are timed by themselves"
    gpu("--flush", action="store_const", const=True, help=flush)
    layer = "also time a layer: dispatch, experts, combine; a name gives its sizes"
    gpu("--layer", nargs="?", const="given", choices=["given", *LAYERS], help=layer)
    halves = "also time send and receive of dispatch and combine, each by itself"
    gpu("--halves", action="store_const", const=True, help=halves)
    gpu(
        "--mirror",
        type=at_least_1,
        metavar="W",
        help="measure rank 0 of W ranks on two GPUs, or one that is its own partner (no)",
    )
    gpu("--ffn", type=at_least_1, help="width of an expert of the layer (2048)")
    gemm = "products of the layer: triton, torch, MODULE:FUNCTION (auto: the faster of the first)"
    gpu("--gemm", metavar="NAME", help=gemm)
    return parser


def _names(text: str) -> tuple[str, ...]:
    for name in (names := tuple(text.split(","))):
        if name not in ("default", "T") and not name.isdecimal():
            raise argparse.ArgumentTypeError(f"{name!r} is neither a number, default nor T")
    return names


def _refuse_nonsense(parser: argparse.ArgumentParser, options: Options) -> None:
    if not options.trace and options.experts % options.ranks:
        parser.error(f"--experts {options.experts} is not a multiple of --ranks {options.ranks}")
    if not options.trace and options.topk > options.experts:
        parser.error(f"--topk {options.topk} is more than --experts {options.experts}")
    row_bytes = options.hidden * options.wire_dtype.itemsize
    if options.hidden < 1 or row_bytes % 16:
        parser.error(
            f"--hidden {options.hidden}: a row of {options.dtype} is {row_bytes} bytes, must be a "
            "positive multiple of 16"
        )
    if options.combine_dtype and options.hidden % INT10_BLOCK:
        parser.error(
            f"--combine-dtype {options.combine_dtype}: --hidden {options.hidden} must be a "
            f"multiple of {INT10_BLOCK}"
        )
    if options.deep_ep_module is not None and options.api != "deep_ep":
        parser.error("--deep-ep-module is for --api deep_ep")
    if options.deep_ep_module is not None and not _is_there(options.deep_ep_module):
        parser.error(f"--deep-ep-module: no module is named {options.deep_ep_module}")
    if options.api == "deep_ep" and options.dtype not in ("fp8", "bf16"):
        parser.error(f"--dtype {options.dtype}: DeepEP's calls take fp8 and bf16")
    if options.layer and options.layout == "by_rank":
        parser.error("--layer needs rows by expert: --layout padded or grouped")
    if options.gemm not in ("auto", "triton", "torch"):
        module, _, function = options.gemm.partition(":")
        if not function or not _is_there(module):
            parser.error(f"--gemm {options.gemm}: no module {module} with a function behind ':'")
    if options.check and options.api == "deep_ep":
        parser.error("--check is of AllToAll's own calls: not with --api deep_ep")
    timed = options.transport == TIMED
    if timed and (options.hosts > 1 or options.seed):
        parser.error("--transport timed is for the ranks of one host, in order: no --seed")
    if not timed and options.preset != "cx7":
        parser.error("--preset is of --transport timed")
    if options.hosts > 1 and (options.seed or options.latency_us):
        parser.error("--seed, --latency-us are of the software NIC, which reaches one host")
    if options.seed and (options.gbps or options.latency_us):
        parser.error("--seed reorders at will: it excludes the link model (--gbps, --latency-us)")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no package above it; no name of a module
        return False
