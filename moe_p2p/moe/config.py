"""The configuration of a communicator. Checked here field by field, before anything is allocated.

Symbols: W ranks, L ranks per node, T rows of one rank's x, K top-k, E experts, H hidden size,
M tokens per step (chunk_tokens), S steps in flight.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from moe_p2p import env, errors, library
from moe_p2p.engine.config import ArrivalFlags, EngineConfig
from moe_p2p.library import numbers_of, settings_text
from moe_p2p.machine.launches import BulkSteps, few
from moe_p2p.machine.transport import LOOPBACK, shared_settings
from moe_p2p.moe.gpu.launch_shape import flags_itself
from moe_p2p.moe.options import PARTIALS

PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
COMBINE_DTYPES = PAYLOAD_DTYPES[:3]
DEFAULT_CHUNK_TOKENS = 512
MOST_PARTS = 4  # kMaxParts of kernels/abi/region.h
_PART_BYTES, _NIC_PART_BYTES = 2 << 20, 256 << 10
MAX_RANKS = 8192
_CPU = torch.device("cpu")
_DEVICES = ("cpu", "cuda")


def default_part_bytes(provider: str, step_bytes: int) -> int:
    """Returns part_bytes of communicators over that provider that nobody has measured; the model
    (`python -m moe_p2p model`) takes it too.

    step_bytes: of a step's longest message. Over NICs parts overlap sums with the wire, where they
    are long enough for a post each (benchmarks/NOTES.md, "Parts"); "loopback" copies them one
    after another.
    """
    fills = step_bytes >= MOST_PARTS * _NIC_PART_BYTES
    return _NIC_PART_BYTES if fills and provider != LOOPBACK else _PART_BYTES


# Each rank may choose these by itself; all other fields must be equal on all ranks. agreement.py
# compares `transport`: ranks may choose the same one in different ways.
LOCAL_FIELDS = frozenset(
    {
        "timeout_s",
        "wait",
        "num_threads",
        "num_sms",
        "transport",
        "nics_per_rank",
        "nics",
        "lost",
    }
)


@dataclass(frozen=True, kw_only=True)
class AllToAllConfig(EngineConfig):
    """Configuration of an `AllToAll` and, as in EngineConfig, of the engine that it makes.

    Fields that size memory bound what later calls may ask for.

    num_experts: E, at most 32768.
    hidden_dim: H; a row of the dispatched type must be a multiple of 16 bytes.
    topk: K, at most 32.
    max_tokens: largest T of any rank and call.
    chunk_tokens: M; memory grows with it, a call with more tokens runs as several steps. None:
        min(max_tokens, 512), with mask_lost_ranks max_tokens, which is the least then.
    dtype: widest type that will be dispatched: bfloat16, float16, float32 or float8_e4m3fn.
    combine_dtype: widest type that will be combined. None: dtype, or bfloat16 for float8_e4m3fn.
    combine_rows: rows of a token that a rank may send back one by one, for combine(order="rows"):
        min(K, experts of a rank) are enough for it.
    extra_bytes: bytes of all extras of one token, each rounded up to 16.
    part_bytes: between nodes, what a step sends leaves in up to four parts of at least so many
        bytes, and GPUs receive it part by part. 0, or on GPUs with mask_lost_ranks: as a whole.
        None: what `python -m moe_p2p tune` has measured on rank 0's machine, else
        default_part_bytes: 256 KiB over NICs where step_tokens rows make four such parts, 2 MiB
        for shorter steps and over "loopback".
    steps_in_flight: S, 2 to 16: how many steps may begin from a dispatch to its combine, its own
        included.
    expert_rank: owner of each expert. None: equal blocks in order.
    ranks_per_node: L, at most 64. None: ranks with the same host; they must be consecutive.
    num_threads: threads of the host kernels. None: CPUs of this process / ranks on this host.
    device: "cpu", or "cuda" for tensors on the current CUDA device of each rank, as a torch.device
        or its name; kept as a torch.device.
    num_sms: thread blocks that a call may use on a GPU. None: as many as help. Ranks may differ,
        but when steps have 129 to 256 tokens, all ranks have at most 48 or all have more.
    arrival_flags: for one release, in place of transport_settings="arrival_flags=...", which says
        how a GPU sees what has arrived from other nodes. "write": the sender's NIC stores a flag
        into its memory behind the data, where all NICs keep writes in order (verbs with
        ordered_writes=1). "gdrcopy": the rank's thread stores it, where GDRCopy is installed.
        "relay": that thread raises a word on the host, and a block of each kernel passes it on.
        "auto": the first of them that can be. `AllToAll.arrival_flags` says which.
    mask_lost_ranks: a rank that is gone, or does not arrive within timeout_s, is masked: calls go
        on without it (AllToAll.masked). For ranks of one node, or ranks_per_node=1.
    lost: what a combine returns of a token whose rank was lost after its dispatch. "drop": the sum
        of what the other ranks sent. "poison": NaN; check() then raises once, naming step and rank,
        as calls do that autograd records; on GPUs as soon as kernels have reported. None: "poison"
        in worlds that change, else "drop". `AllToAll.lost_tokens` counts either.

    Raises InvalidArgumentError naming the field, its value and the limit.
    """

    num_experts: int
    hidden_dim: int
    topk: int
    max_tokens: int
    chunk_tokens: int | None = None
    dtype: torch.dtype = torch.bfloat16
    combine_dtype: torch.dtype | None = None
    combine_rows: int = 1
    extra_bytes: int = 0
    part_bytes: int | None = None
    steps_in_flight: int = 2
    expert_rank: tuple[int, ...] | None = None
    ranks_per_node: int | None = None
    num_threads: int | None = None
    device: torch.device | str = _CPU
    num_sms: int | None = None
    arrival_flags: dataclasses.InitVar[ArrivalFlags | None] = None
    mask_lost_ranks: bool = False
    lost: Literal["poison", "drop"] | None = None

    def __post_init__(self, arrival_flags: ArrivalFlags | None) -> None:
        if arrival_flags is not None:
            given = f"arrival_flags={arrival_flags}"
            text = f"arrival_flags became a setting: transport_settings={given!r}"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            settings = ",".join(filter(None, [self.all_settings, given]))
            object.__setattr__(self, "transport_settings", settings)
        super().__post_init__()
        self._check_range("num_experts", 1, 32768)
        self._check_range("hidden_dim", 1, 1 << 20)
        self._check_range("topk", 1, 32)
        self._check_range("max_tokens", 1, 1 << 24)
        self._check_range("chunk_tokens", 1, 1 << 20)
        self._check_range("combine_rows", 1, 32)
        self._check_range("extra_bytes", 0, 1 << 20)
        self._check_range("part_bytes", 0, 1 << 30)
        self._check_range("steps_in_flight", 2, 16)
        self._check_range("ranks_per_node", 1, MAX_RANKS)
        if self.ranks_per_node is not None:  # one text for every use of a node that is too large
            library.call(torch.ops.moe_p2p.check_ranks_per_node.default, self.ranks_per_node)
        self._check_range("num_threads", 1, 1024)
        self._check_choice("dtype", PAYLOAD_DTYPES)
        if self.combine_dtype is not None:
            errors.require(
                str(self.combine_dtype) not in PARTIALS,
                f"combine_dtype is {self.combine_dtype!r}, which is asked of a call: "
                f"combine(..., partials={self.combine_dtype!r}); here it is the widest dtype of "
                "rows that are combined",
            )
            self._check_choice("combine_dtype", COMBINE_DTYPES)
        self._check_range("num_sms", 1, 1024)
        errors.require(
            str(self.device) in _DEVICES,
            f"device is {str(self.device)!r}, must be one of {_DEVICES}; of several GPUs a rank "
            "uses the current one (torch.cuda.set_device)",
        )
        object.__setattr__(self, "device", torch.device(self.device))
        self._check_choice("mask_lost_ranks", (False, True))
        self._check_choice("lost", (None, "poison", "drop"))
        errors.require(
            self.topk <= self.num_experts,
            f"topk is {self.topk}, must be at most num_experts {self.num_experts}",
        )
        if self.expert_rank is not None:
            object.__setattr__(self, "expert_rank", tuple(self.expert_rank))
            errors.require(
                len(self.expert_rank) == self.num_experts,
                f"expert_rank has {len(self.expert_rank)} entries, must have one for each of the "
                f"{self.num_experts} experts",
            )

    @property
    def on_gpu(self) -> bool:
        return str(self.device) == "cuda"

    @property
    def step_tokens(self) -> int:
        """M: chunk_tokens, or what None stands for."""
        if self.chunk_tokens is None and self.mask_lost_ranks:
            return self.max_tokens
        return self.chunk_tokens or min(self.max_tokens, DEFAULT_CHUNK_TOKENS)

    @property
    def widest_combine_dtype(self) -> torch.dtype:
        """combine_dtype, or what None stands for."""
        if self.combine_dtype is not None:
            return self.combine_dtype
        return torch.bfloat16 if self.dtype == torch.float8_e4m3fn else self.dtype

    def num_local_experts(self, rank: int, world_size: int) -> int:
        """E_local: the number of experts that `rank` owns."""
        if self.expert_rank is None:
            return self.num_experts // world_size
        return self.expert_rank.count(rank)

    def expert_owners(self, world_size: int) -> list[int]:
        """The rank that owns each expert, [E]."""
        if self.expert_rank is not None:
            return list(self.expert_rank)
        each = self.num_experts // world_size
        return [expert // each for expert in range(self.num_experts)]

    @property
    def least_part_bytes(self) -> int:
        """part_bytes, or what None stands for over "loopback" (regions are alike over all)."""
        return _PART_BYTES if self.part_bytes is None else self.part_bytes

    def with_parts(self, provider: str, measured: int | None = None) -> AllToAllConfig:
        """Itself with the part_bytes that None stands for over this provider."""
        if self.part_bytes is not None:
            return self
        if measured is None:
            row_bytes = self.hidden_dim * self.widest_combine_dtype.itemsize
            measured = default_part_bytes(provider, self.step_tokens * row_bytes)
        return dataclasses.replace(self, part_bytes=measured)

    def agreed(self, bulk: BulkSteps | None = None) -> dict[str, str]:
        """The fields that must be equal on all ranks, as text. bulk: rank 0's; None: shipped."""
        values = {
            field.name: str(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in LOCAL_FIELDS
        }
        return values | {
            "chunk_tokens": str(self.step_tokens),
            "combine_dtype": str(self.widest_combine_dtype),
            "transport_settings": shared_settings(self.provider_settings),
            "MOE_P2P_FABRIC": str(env.fabric()),
            "part_bytes": str(self.least_part_bytes),
            "num_sms": self._class_of_num_sms(bulk),
        }

    def _class_of_num_sms(self, steps: BulkSteps | None) -> str:
        """'few' or 'many' when num_sms changes the wire format, else 'any'. Equal on all ranks."""
        step, masks = self.step_tokens, self.mask_lost_ranks
        ways = {flags_itself(step, masks=masks, bulk=bulk, steps=steps) for bulk in (False, True)}
        if not self.on_gpu or len(ways) == 1:
            return "any"
        return "few" if few(self.num_sms) else "many"

    def settings(self, world_size: int, ranks_per_node: int, **more: object) -> str:
        """The text for the ops `plan` and `all_to_all_create` (communicator_settings.cpp)."""
        values = {
            "world_size": world_size,
            "ranks_per_node": ranks_per_node,
            "num_experts": self.num_experts,
            "hidden_dim": self.hidden_dim,
            "topk": self.topk,
            "max_tokens": self.max_tokens,
            "chunk_tokens": self.step_tokens,
            "steps_in_flight": self.steps_in_flight,
            "payload_item_bytes": self.dtype.itemsize,
            "combine_item_bytes": self.widest_combine_dtype.itemsize,
            "combine_rows": self.combine_rows,
            "extra_bytes": self.extra_bytes,
            "part_bytes": self.least_part_bytes,
        } | more
        if self.expert_rank is not None:
            values["expert_rank"] = list(self.expert_rank)
        return settings_text(**values)

    def plan(self, *, world_size: int, ranks_per_node: int) -> dict[str, int]:
        """Bytes of every memory region of one rank, all steps together, by name of the region.

        Needs no communicator. Raises InvalidArgumentError when the numbers do not fit together.
        """
        text = library.call(
            torch.ops.moe_p2p.plan.default, self.settings(world_size, ranks_per_node)
        )
        return numbers_of(text)
