"""`python -m moe_p2p accuracy`: errors of combine by the type of the partial sums that travel.

Rows of experts are drawn, combined by the reference (moe_p2p/moe/reference, which AllToAll
reproduces bit for bit) and compared with sums in float64 of the same rows: as a whole, and value by
value as CollectiveX does, whose bound is a relative error of 8 steps of bfloat16. W ranks, L ranks
per node, T tokens, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.moe.options import INT10_BLOCK
from moe_p2p.moe.reference import Routing, Tokens, Topology, int10
from moe_p2p.tools.option_types import Parser, at_least_0, at_least_1
from moe_p2p.tools.out_of_memory import not_allocated

_OUTLIERS, _FACTOR, _SPREAD = 0.005, 20.0, 0.5
_LEAST_HIDDEN = 256
_GATE, _FLOOR = 8 * 2.0**-8, 0.02  # of a value at least so large
Draw = Callable[[int, int, torch.Generator], Tensor]


def _gaussian(rows: int, hidden: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, hidden, generator=generator)


def _student(rows: int, hidden: int, generator: torch.Generator) -> Tensor:
    """Student's t of 4 degrees of freedom: heavy tails."""
    squares = torch.randn(4, rows, hidden, generator=generator).square().mean(0)
    return torch.randn(rows, hidden, generator=generator) / squares.sqrt()


def _outliers(rows: int, hidden: int, generator: torch.Generator) -> Tensor:
    """Channels of their own sizes, one in 200 of them 20 times as large."""
    scale = torch.exp(_SPREAD * torch.randn(hidden, generator=generator))
    large = torch.randperm(hidden, generator=generator)[: round(_OUTLIERS * hidden)]
    scale[large] *= _FACTOR
    return torch.randn(rows, hidden, generator=generator) * scale


DRAWS: dict[str, Draw] = {
    "Gaussian": _gaussian,
    "Student-4": _student,
    "outlier channels": _outliers,
}


def _e4m3(x: Tensor) -> Tensor:
    return reference.dequantize(*reference.quantize(x))


def _int16(x: Tensor) -> Tensor:
    """15-bit integers with an exact scale for each 8 values: block16 without room for a scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 8)
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 16383
    integers: Tensor = (blocks / scale).round()
    return (integers * scale).flatten(-2)


class Errors(NamedTuple):
    """Relative errors of sums."""

    whole: float  # of all values, as one vector
    largest: float  # of one value that is at least _FLOOR


def errors(draw: Draw, *, tokens: int, hidden: int, seed: int) -> dict[str, Errors]:
    """Errors of T sums of 8 ranks, top-8 of 256 experts, by name of the type."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, 256, generator=generator).topk(8, dim=1)
    weights = torch.softmax(torch.randn(tokens, 8, generator=generator), dim=1)
    found, y = dict[str, Errors](), list[Tensor]()
    for local, kinds in ((8, (None, "int10", "block16")), (4, ("int10_nodes",))):
        routing = _route(local, hidden, chosen.indices, weights)
        if not y:
            rows = [int(offsets[-1]) for offsets in routing.offsets]
            y = [draw(n, hidden, generator).bfloat16() for n in rows]
            exact = _exact(routing, y, weights)
            sums = {
                name: _through(routing, y, weights, sent).bfloat16()
                for name, sent in (
                    ("int16, a scale per 8", _int16),
                    ("e4m3, a scale per 128", _e4m3),
                )
            }
        for kind in kinds:
            name = "bfloat16" if kind is None else kind
            name += ", nodes of 4" if local == 4 else ""
            how: dict[str, Any] = {"combine_dtype": kind}
            sums[name] = reference.combine(routing, 0, y, out_dtype=torch.bfloat16, **how)
    for name, out in sums.items():
        error = (out.double() - exact).abs()
        largest = float((error / exact.abs().clamp_min(_FLOOR)).max())
        found[name] = Errors(float(error.norm() / exact.norm()), largest)
    return found


def _route(local: int, hidden: int, topk_idx: Tensor, weights: Tensor) -> Routing:
    """Tokens of rank 0 alone."""
    tokens = [
        Tokens(
            x=torch.zeros(count, hidden, dtype=torch.bfloat16),
            topk_idx=topk_idx[:count],
            topk_weights=weights[:count],
        )
        for count in (len(topk_idx), *[0] * 7)
    ]
    topology = Topology(world_size=8, ranks_per_node=local, num_experts=256)
    return reference.route(topology, tokens, layout="grouped")


def _exact(routing: Routing, y: list[Tensor], weights: Tensor) -> Tensor:
    rank, row = routing.table(0)
    out = torch.zeros(len(weights), y[0].shape[1], dtype=torch.float64)
    for k in range(weights.shape[1]):
        rows = torch.stack(
            [y[r][i] for r, i in zip(rank[:, k].tolist(), row[:, k].tolist(), strict=True)]
        )
        out += weights[:, k, None].double() * rows.double()
    return out


def _through(
    routing: Routing, y: list[Tensor], weights: Tensor, sent: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sums of what sent() makes of each rank's partial sums."""
    rank, row = routing.table(0)
    out = torch.zeros(len(weights), y[0].shape[1])
    for owner, rows in enumerate(y):
        partial = torch.zeros_like(out)
        for k in range(weights.shape[1]):
            token = (rank[:, k] == owner).nonzero().flatten()
            partial[token] += weights[token, k, None] * rows[row[token, k]].float()
        out += sent(partial)
    return out


def bytes_of(hidden: int) -> dict[str, float]:
    """Bytes of a row, as parts of bfloat16's."""
    packed = int10.row_bytes(hidden)
    return {
        "bfloat16": 1.0,
        "block16": 1.0,
        "int16, a scale per 8": 1.0,
        "int10": packed / (2 * hidden),
        "int10_nodes, nodes of 4": packed / (2 * hidden),
        "e4m3, a scale per 128": (hidden + 4 * -(-hidden // 128)) / (2 * hidden),
    }


def main(arguments: list[str]) -> int:
    """Prints the table; exit code 2 when there is no memory for it."""
    parser = Parser(
        prog="python -m moe_p2p accuracy",
        description="Relative error of combine, |out - exact| / |exact|, by what travels: 8 ranks, "
        "top-8 of 256 experts, bfloat16 rows and results: of all values, and the largest of "
        "one (divided by 0.02 at least), which CollectiveX wants below 0.03125.",
    )
    parser.add_argument("--tokens", type=at_least_1, default=64, help="T")
    parser.add_argument("--hidden", type=at_least_1, default=7168, help="H, a multiple of 32")
    parser.add_argument("--seed", type=at_least_0, default=0, help="of what is drawn")
    given = parser.parse_args(arguments)
    if given.hidden % INT10_BLOCK or given.hidden < _LEAST_HIDDEN:
        parser.error(
            f"--hidden {given.hidden}: must be a multiple of {INT10_BLOCK} from {_LEAST_HIDDEN} on"
        )
    sizes = bytes_of(given.hidden)
    try:
        columns = {
            name: errors(draw, tokens=given.tokens, hidden=given.hidden, seed=given.seed)
            for name, draw in DRAWS.items()
        }
    except (RuntimeError, MemoryError) as error:
        if not (missing := not_allocated(error)):
            raise
        asked = f"--tokens {given.tokens} --hidden {given.hidden}"
        print(f"accuracy: no memory for {missing} of {asked}; lower one of them", file=sys.stderr)
        return 2
    names = [*columns, *(f"{name}, largest" for name in columns)]
    print(f"| {'travels':23} | bytes | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for kind, size in sizes.items():
        found = [column[kind] for column in columns.values()]
        cells = [f"{100 * each.whole:.3f}%" for each in found]
        cells += [f"{each.largest:.4f}" for each in found]
        aligned = [cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)]
        print(f"| {kind:23} | {size:.3f} | " + " | ".join(aligned) + " |")
    print(f"CollectiveX's gate of the largest error: {_GATE:.5f}")
    return 0
