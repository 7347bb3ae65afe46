"""What one side of a KV transfer keeps, and on which rank: the input of `kv_plan`.

A side is an engine for prefill or for decode: pp * tp ranks, rank = stage * tp + tp_rank. Its cache
has groups of layers that share their shape and their list of pages. A token of a group has `heads`
heads, each `k_bytes` of K and `v_bytes` of V; MLA has one head, its latent, and no V. A state
(Mamba's, say) is a group whose page holds one request's state, cut into `heads` equal shards.

Nothing here is an address. `KVMemory` in moe_p2p/kv/memory.py says where layers begin.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from moe_p2p.errors import require, require_type, wrong_type

# Dimensions of memory, outermost first: L layers, B pages (blocks), N tokens, H heads, C content: K
# and V of a head and token side by side. NHD and HND keep K and V apart instead, each [.., N, H, D]
# or [.., H, N, D]: of one page where kv_split is "page", of all pages where it is "layer". Code
# reads the letters: BL in front, a page has all layers (_dense, dense_memory); H before N, heads
# are outside of tokens (_dense); keeps_kv_apart has those without C.
ORDERS = ("NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC")
KV_SPLITS = ("page", "layer")
KINDS = ("attention", "window", "state")


class Part(NamedTuple):
    """Bytes of K, of V, or of both, of one layer: byte b of a head and token of a page lies at
    offset + page * page_stride + head * head_stride + token * token_stride + b."""

    nbytes: int
    offset: int
    page_stride: int
    head_stride: int
    token_stride: int


class Holding(NamedTuple):
    """What a rank of a stage keeps of a group: heads, and tokens dealt to `dcp_rank`.

    Ranks that differ in `replica` only keep the same bytes.
    """

    first_head: int
    num_heads: int
    dcp_rank: int
    replica: int


@dataclass(frozen=True)
class KVGroup:
    """Layers of one shape that share a list of pages.

    name: in errors and tables; the two sides match groups by it.
    layers: numbers of the model's layers, ascending.
    heads: of the whole model, before tensor parallelism. MLA: 1. State: number of equal shards.
    k_bytes, v_bytes: bytes of K and V of one head and token. MLA and state: v_bytes is 0.
    page_size: tokens of a page on one rank. State: 1.
    kind: "attention"; "window": only the last `window` tokens are needed; "state": one page a
        request, sent with its last chunk.
    page_stride: bytes from a page of a layer to the next, where pages are padded. None: no padding.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    k_bytes: int
    v_bytes: int
    page_size: int
    kind: str = "attention"
    window: int | None = None
    page_stride: int | None = None

    def __post_init__(self) -> None:
        require_type("KVGroup.name", self.name, str, "a str")
        where = f"group {self.name!r}:"
        layers = self.layers
        if not isinstance(layers, tuple) or not all(type(layer) is int for layer in layers):
            raise wrong_type(f"{where} layers", layers, "a tuple of ints; pass tuple(range(n))")
        require(
            bool(layers) and layers[0] >= 0 and layers == tuple(sorted(set(layers))),
            f"{where} layers must be numbers of layers from 0 on, at least one, each once, "
            f"ascending, not {layers}",
        )
        for field in ("heads", "k_bytes", "page_size"):
            _require_int(f"{where} {field}", getattr(self, field), 1)
        _require_int(f"{where} v_bytes", self.v_bytes, 0)
        _require_choice(f"{where} kind", self.kind, KINDS)
        if self.kind == "window":
            _require_int(f"{where} window", self.window, 1)
        else:
            require(
                self.window is None,
                f'{where} window is {self.window}, but kind is "{self.kind}"; pass kind="window"',
            )
        if self.page_stride is not None:
            _require_int(f"{where} page_stride", self.page_stride, 1)
        if self.kind == "state":
            require(
                self.page_size == 1 and self.v_bytes == 0,
                f"{where} a page of a state is one request's state: page_size must be 1, not "
                f"{self.page_size}, v_bytes must be 0, not {self.v_bytes}, and k_bytes those of a "
                "shard",
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer, all heads (of a state: of the whole state)."""
        return self.heads * (self.k_bytes + self.v_bytes)


@dataclass(frozen=True)
class KVLayout:
    """The cache of one side.

    groups: all of its groups; hybrid models have several.
    order: one of ORDERS; kv_split: for NHD and HND, whether V follows K in each "page", or K and V
        of a "layer" are tensors of their own.
    tp, pp: tensor and pipeline parallelism. Where tp exceeds a group's heads, each head is kept by
        tp / heads ranks that follow each other.
    dcp: decode context parallelism. Tokens of a head are dealt round robin, dcp_interleave at a
        time, to dcp ranks that follow each other among its tp / heads; states are not dealt.
    stages: layers of the model per pipeline stage. None: all stages the same number.
    """

    groups: tuple[KVGroup, ...]
    order: str = "NHD"
    kv_split: str = "page"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    dcp_interleave: int = 1
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        groups = self.groups
        if not isinstance(groups, tuple) or not all(type(group) is KVGroup for group in groups):
            raise wrong_type("KVLayout.groups", groups, "a tuple of KVGroups")
        names = [group.name for group in groups]
        require(
            bool(groups) and len(set(names)) == len(names),
            f"KVLayout.groups must be at least one group, each with a name of its own, not {names}",
        )
        _require_choice("KVLayout.order", self.order, ORDERS)
        _require_choice("KVLayout.kv_split", self.kv_split, KV_SPLITS)
        require(
            self.kv_split == "page" or self.keeps_kv_apart,
            f'KVLayout.kv_split is "layer", but {self.order} keeps K and V side by side; pass '
            'order="NHD" or "HND", or leave kv_split out',
        )
        for field in ("tp", "pp", "dcp", "dcp_interleave"):
            _require_int(f"KVLayout.{field}", getattr(self, field), 1)
        self._check_stages()
        for group in groups:
            self._check_group(group)

    def _check_stages(self) -> None:
        layers = self.num_layers
        if self.stages is None:
            require(
                layers % self.pp == 0,
                f"KVLayout.pp: {layers} layers do not divide into {self.pp} equal stages; pass "
                "stages=(layers of each)",
            )
            return
        stages = self.stages
        if not isinstance(stages, tuple) or not all(type(n) is int for n in stages):
            raise wrong_type("KVLayout.stages", stages, "a tuple of ints, or None")
        require(
            len(stages) == self.pp and min(stages) >= 0 and sum(stages) >= layers,
            f"KVLayout.stages is {stages}: it must have a number for each of {self.pp} stages, and "
            f"all {layers} layers must be in one",
        )

    def _check_group(self, group: KVGroup) -> None:
        where, tp, heads = f"group {group.name!r}:", self.tp, group.heads
        require(
            heads % tp == 0 or tp % heads == 0,
            f"{where} {heads} heads do not fit tp={tp}: one must divide the other; "
            "choose tp accordingly",
        )
        dcp = self.dcp_of(group)
        replicas = max(tp // heads, 1)
        require(
            replicas % dcp == 0,
            f"{where} dcp={dcp} deals tokens to ranks that keep the same heads, and tp={tp} has "
            f"{replicas} for each of {heads} heads; dcp must divide {replicas}",
        )
        require(
            dcp == 1 or group.page_size % self.dcp_interleave == 0,
            f"{where} page_size={group.page_size} must be a multiple of "
            f"dcp_interleave={self.dcp_interleave}",
        )
        if group.page_stride is None:
            return
        least = max(
            part.page_stride
            for stage in range(self.pp)
            for part in self._dense(group, len(self.layers_of(group, stage)))
        )
        require(
            group.page_stride >= least,
            f"{where} page_stride={group.page_stride} is less than a page, which has {least} bytes "
            f"on a rank of this layout ({self.order}); pass what the allocator uses, or None",
        )

    @property
    def keeps_kv_apart(self) -> bool:
        return "C" not in self.order

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def num_layers(self) -> int:
        """Of the model, as far as its groups say."""
        return 1 + max(group.layers[-1] for group in self.groups)

    def group(self, name: str) -> KVGroup:
        found = [group for group in self.groups if group.name == name]
        names = [group.name for group in self.groups]
        require(bool(found), f"there is no group {name!r}, only {names}")
        return found[0]

    def dcp_of(self, group: KVGroup) -> int:
        """Number of ranks that a group's tokens are dealt to."""
        return 1 if group.kind == "state" else self.dcp

    def interleave_of(self, group: KVGroup) -> int:
        """Tokens that follow each other on a rank; whole pages where tokens are not dealt."""
        return group.page_size if self.dcp_of(group) == 1 else self.dcp_interleave

    def page_tokens(self, group: KVGroup) -> int:
        """Tokens of a page index, on all ranks together."""
        return group.page_size * self.dcp_of(group)

    def layers_of(self, group: KVGroup, stage: int) -> range:
        """Places in `group.layers` of the layers that a stage keeps."""
        stages = self.stages or (self.num_layers // self.pp,) * self.pp
        first = sum(stages[:stage])
        inside = [i for i, at in enumerate(group.layers) if first <= at < first + stages[stage]]
        return range(inside[0], inside[-1] + 1) if inside else range(0)

    def holding(self, group: KVGroup, tp_rank: int) -> Holding:
        copies = max(self.tp // group.heads, 1)
        num_heads = max(group.heads // self.tp, 1)
        dcp = self.dcp_of(group)
        return Holding(
            first_head=tp_rank // copies * num_heads,
            num_heads=num_heads,
            dcp_rank=tp_rank % dcp,
            replica=tp_rank % copies // dcp,
        )

    def replicas(self, group: KVGroup) -> int:
        """Number of ranks of a stage that keep the same bytes."""
        return max(self.tp // group.heads, 1) // self.dcp_of(group)

    def parts(self, group: KVGroup, num_layers: int) -> tuple[Part, ...]:
        """K, then V where there is one, on a rank that keeps `num_layers` layers of the group."""
        dense = self._dense(group, num_layers)
        if group.page_stride is None:
            return dense
        return tuple(part._replace(page_stride=group.page_stride) for part in dense)

    def _dense(self, group: KVGroup, num_layers: int) -> tuple[Part, ...]:
        heads, tokens = max(group.heads // self.tp, 1), group.page_size
        sizes = [nbytes for nbytes in (group.k_bytes, group.v_bytes) if nbytes]
        content = sum(sizes)
        apart, heads_outside = self.keeps_kv_apart, self.order.index("H") < self.order.index("N")
        page = heads * tokens * content * (num_layers if self.order.startswith("BL") else 1)
        parts, offset = [], 0
        for nbytes in sizes:
            step = nbytes if apart else content
            parts.append(
                Part(
                    nbytes=nbytes,
                    offset=offset,
                    page_stride=heads * tokens * nbytes if self.kv_split == "layer" else page,
                    head_stride=tokens * step if heads_outside else step,
                    token_stride=step if heads_outside else heads * step,
                )
            )
            if self.kv_split == "page":
                offset += heads * tokens * nbytes if apart else nbytes
        return tuple(parts)

    def replace(self, **changes: object) -> KVLayout:
        """The same groups laid out otherwise: a copy with these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _require_int(name: str, value: object, least: int) -> None:
    if type(value) is not int:
        raise wrong_type(name, value, "an int")
    require(value >= least, f"{name} is {value}, must be at least {least}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    require(value in choices, f"{name} is {value!r}, must be one of {', '.join(choices)}")
