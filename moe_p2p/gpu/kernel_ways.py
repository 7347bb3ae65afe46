"""Other ways of doing parts of a kernel, for measuring them beside the present ones.

A text chooses them, "dispatch_receive=place,combine_own=y": MOE_P2P_KERNEL_SETTINGS, which is read
whenever a communicator is made, and by `benchmarks/mirror_turns.py TREE@TEXT`. Results are the same
bits, and nothing that travels changes, so ranks may differ. The first way of each part is the
present one, which is compiled without a macro.
"""

from __future__ import annotations

from moe_p2p import errors

_COPIERS = 4  # warps of a block that copy rows; a multiprocessor's copies need no more
_MOST_IMAGES, _LEAST_IMAGES = 7, 3  # of each: kernels/dispatch/bulk_place.cuh
_JOB_BYTES = 64 * 24 + 256
_MAX_PLACED_TOPK = 12  # a slot's head is one line
# part: way: macros. docs/gpu.md, "Ways to choose from", says what each does.
WAYS: dict[str, dict[str, dict[str, int]]] = {
    "combine_own": {"store": {}, "y": {"MOE_P2P_COMBINE_OWN": 1}},
    "dispatch_counts": {"sender": {}, "receiver": {"MOE_P2P_DISPATCH_COUNTS": 1}},
    "dispatch_own": {"store": {}, "x": {"MOE_P2P_DISPATCH_OWN": 1}},
    "dispatch_receive": {"rings": {}, "place": {"MOE_P2P_DISPATCH_PLACE": 1}},
    "dispatch_routing": {"whole": {}, "pieces": {"MOE_P2P_DISPATCH_PIECES": 1}},
    "dispatch_scales": {"warp": {}, "bulk": {"MOE_P2P_DISPATCH_SCALES": 1}},
}


def macros_of(text: str) -> dict[str, int]:
    """Returns what kernels are compiled with. Raises InvalidArgumentError for an unknown way."""
    macros: dict[str, int] = {}
    for each in filter(None, text.split(",")):
        part, _, way = each.partition("=")
        errors.require(
            part in WAYS, f"kernel settings: {part!r} is no part; there are {', '.join(WAYS)}"
        )
        ways = WAYS[part]
        errors.require(
            way in ways, f"kernel settings: {part} is {way!r}, must be {' or '.join(ways)}"
        )
        macros |= ways[way]
    return macros


# Read by route_warps() and copiers() alone, which give kernels other macros.
_OF_THE_HOST = ("MOE_P2P_DISPATCH_PIECES", "MOE_P2P_DISPATCH_PLACE")


def without_others(kernel: str, macros: dict[str, int]) -> dict[str, int]:
    """Returns macros of `kernel`, "dispatch" or another, without ways that it does not have: those
    of other kernels, and all where rows do not go in bulk. So one kernel is compiled once."""
    own = f"{kernel}_" if macros["MOE_P2P_BULK"] else "none_"
    others = {name for part, ways in WAYS.items() if not part.startswith(own)
              for way in ways.values() for name in way}  # fmt: skip
    return {name: value for name, value in macros.items() if name not in {*others, *_OF_THE_HOST}}


def route_warps(macros: dict[str, int]) -> dict[str, int]:
    """Returns macros of a bulk dispatch in whose blocks one warp more routes; {}: there is none."""
    return {"MOE_P2P_ROUTE_WARPS": 1} if macros.get("MOE_P2P_DISPATCH_PIECES") else {}


def copiers(
    macros: dict[str, int], by_rank: bool, copied_bytes: int, room: int
) -> tuple[dict[str, int], int]:
    """Returns macros of warps that copy placed slots, and their shared memory; {}, 0: there are
    none. copied_bytes: of a slot, behind its head. room: bytes of shared memory for all images.
    """
    place = -(-copied_bytes // 128) * 128 + 8
    images = min(((room - _JOB_BYTES) // _COPIERS - 256) // place, _MOST_IMAGES)
    wanted = bool(macros.get("MOE_P2P_DISPATCH_PLACE")) and by_rank
    if not wanted or images < _LEAST_IMAGES or macros["MOE_P2P_TOPK"] > _MAX_PLACED_TOPK:
        return {}, 0
    used = _JOB_BYTES + _COPIERS * (images * place + 256)
    return {"MOE_P2P_COPIERS": _COPIERS, "MOE_P2P_COPIER_IMAGES": images}, used
