"""docs/protocol.md has the numbers of the code, so a peer can be written from the page.

The tables become assertions for the compiler, over all headers of kernels/abi.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/protocol.md").read_text()
SLOT_TOPK = 8  # K of the page's table of a slot


def table(head: str) -> list[list[str]]:
    """The cells of the table with this head, without it."""
    lines = TEXT[TEXT.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def span(cell: str) -> tuple[int, int]:
    """First and last of `0-7` or `7-0`; one number is both."""
    first, _, last = cell.partition("-")
    low, high = sorted((int(first), int(last or first)))
    return low, high


def member(struct: str, name: str, at: str) -> list[str]:
    first, last = span(at)
    return [
        f"offsetof({struct}, {name}) == {first}",
        f"sizeof({struct}::{name}) == {last - first + 1}",
    ]


def header_claims() -> list[str]:
    after = TEXT.index("**RegionHeader**")
    lines = TEXT[TEXT.index("| bytes |", after) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    claims = [
        claim for at, name, _ in cells for claim in member("RegionHeader", name.strip("`"), at)
    ]
    (size,) = re.findall(r"\*\*RegionHeader\*\*, (\d+) bytes", TEXT)
    return [*claims, f"sizeof(RegionHeader) == {size}"]


def region_claims() -> list[str]:
    """For one shape, with the members of Shape in their order."""
    world, local, experts, topk, tokens, token_bytes, partial_bytes = 12, 3, 40, 8, 70, 208, 176
    count = {"L": local, "N-1": world // local - 1, "(N-1)·L": (world // local - 1) * local}
    names = {
        "header": 128,
        "M": tokens,
        "K": topk,
        "slot": f"slot_bytes({topk}, {token_bytes})",
        "partial": f"align_up({partial_bytes}, 128)",
    }
    shape = f"Shape{{{world}, {local}, 480, {experts}, {topk}, {tokens}, 2, 0, {token_bytes}, "
    regions = f"make_regions({shape}{partial_bytes}}})"
    sizes = {}
    for region, num, _, _, each in table("| region |"):
        bytes_each = re.sub(
            r"counts\((\w)\)",
            lambda n: f"align_up(4 * {local if n[1] == 'L' else n[1]} * (1 + {experts}), 128)",
            each.replace("·", "*"),
        )
        bytes_each = re.sub(
            r"\b(header|slot|partial|M|K)\b", lambda name: str(names[name[1]]), bytes_each
        )
        for name in re.findall(r"`(\w+)`", region):
            num_regions = count[num.replace("`", "").removesuffix(" each")]
            sizes[name] = f"{num_regions} * align_up({bytes_each}, 128)"
            if each.startswith("like "):
                sizes[name] = sizes[each.removeprefix("like ").strip("`")]
    struct = (ROOT / "kernels/abi/region.h").read_text().split("struct Regions {")[1]
    members = re.findall(r"^  u64 (\w+);", struct.split("};")[0], re.MULTILINE)
    assert {*sizes, "step_bytes", "arrivals", "total_bytes"} == set(members)
    others = world // local - 1
    assert "512 bytes for each step slot and other node" in TEXT
    return [
        f"{regions}.{after} - {regions}.{name} == {sizes[name]}"
        for name, after in itertools.pairwise(members[:-2])
    ] + [
        f"{regions}.arrivals % (64 << 10) == 0",
        f"arrival_flags_bytes({shape}{partial_bytes}}}) == 512 * 2 * {others}",
    ]


def flag_claims() -> list[str]:
    claims = []
    for bits, name, _ in table("| bits of `flags` |"):
        low, high = span(bits)
        value = str(low) if high > low else f"1u << {low}"  # a field is named by its shift
        claims.append(f"static_cast<unsigned>({name.strip('`')}) == ({value})")
    types = re.search(r"value type: (\d.*?) \|", TEXT)
    assert types
    kinds = {"bfloat16": "kBFloat16", "float16": "kFloat16", "float32": "kFloat32"}
    kinds |= {"10": "kInt10", "block16": "kBlock16"}  # "10-bit integers"
    for number, name in re.findall(r"(\d) (\w+)", types[1]):
        kind = kinds.get(name, "kFloat8E4M3")
        claims.append(f"static_cast<int>(DType::{kind}) == {number}")
    return claims


def slot_claims() -> list[str]:
    after = TEXT[TEXT.index("**Slot** of a dispatch region") :]
    assert after.split("\n")[0].endswith(f"`K = {SLOT_TOPK}`:")
    lines = after[after.index("| bytes |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    at = {name.strip("`"): where for where, name, _ in cells}
    ids, positions, weights = (
        span(at[name]) for name in ("K expert ids", "K positions", "K weights")
    )
    none = re.search(r"(0x[0-9a-f]+) \(`kNoExpert`\) = none", TEXT)
    assert none
    assert ids[1] - ids[0] + 1 == 2 * SLOT_TOPK
    assert positions[1] - positions[0] + 1 == weights[1] - weights[0] + 1 == 4 * SLOT_TOPK
    return [
        *member("SlotHead", "step", at["step"]),
        *member("SlotHead", "token", at["token"]),
        f"expert_ids_offset() == {ids[0]}",
        f"positions_offset({SLOT_TOPK}) == {positions[0]}",
        f"weights_offset({SLOT_TOPK}) == {weights[0]}",
        f"slot_head_bytes({SLOT_TOPK}) == {int(at['payload'].rstrip('-'))}",
        f"kNoExpert == {none[1]}",
    ]


def word_claims() -> list[str]:
    (parts,) = set(re.findall(r"`(\d) \(e \+ 1\)`", TEXT))
    phases = re.search(r"dispatch \((\d),.*combine \((\d),.*?late weights \((\d),", TEXT, re.DOTALL)
    assert phases
    names = ("kDispatch", "kCombine", "kWeights")
    return [
        f"come(7) == {8 * int(parts)}",
        f"arrival_flag(7, 2, false) == 7 * {parts} + 3",
        "arrival_flag(7, 2, true) == come(7)",
        f"kMaxParts == {parts}",
        *(
            f"static_cast<int>(Phase::{n}) == {at}"
            for n, at in zip(names, phases.groups(), strict=True)
        ),
    ]


def immediate_claims() -> list[str]:
    head = next(line for line in TEXT.splitlines() if line.startswith("| bits | 31"))
    keyed = next(line for line in TEXT.splitlines() if line.startswith("| keyed |"))
    bits = [cell.strip() for cell in head.strip("|").split("|")][2:]
    names = [cell.strip() for cell in keyed.strip("|").split("|")][2:]
    members = dict(
        zip(
            ("communicator", "phase", "step slot", "part", "the last one", "source rank"),
            ("communicator", "phase", "slot", "part", "is_last", "source"),
            strict=True,
        )
    )
    claims = []
    for where, name in zip(bits, names, strict=True):
        low, high = span(where)
        meaning, width = re.fullmatch(r"(.*?) \((\d+)\)", name).groups()  # type: ignore[union-attr]
        assert high - low + 1 == int(width)
        most = (1 << int(width)) - 1
        key = ", ".join(
            f".{each} = {most if each == members[meaning] else 0}" for each in
            ("communicator", "phase", "slot", "source", "part", "is_last")
        )  # fmt: skip
        claims.append(f"moe_p2p::engine::ImmKey{{{key}}}.pack() == (1u << 31 | {most}u << {low})")
    return claims


@pytest.mark.parametrize(
    ("path", "heading"),
    [
        ("csrc/base/mutation.h", "(`csrc/base/mutation.h`)"),
        ("kernels/device/mutation.cuh", "Kernels have faults too"),
    ],
)
def test_tables_of_faults_are_complete(path: str, heading: str) -> None:
    listed = TEXT[TEXT.index(heading) :]
    listed = listed[listed.index("| mutation |") :].split("\n\n")[0]
    (members,) = re.findall(r"enum class Mutation {(.*?)};", (ROOT / path).read_text(), re.DOTALL)
    faults = set(re.findall(r"^\s*(k\w+),", members, re.MULTILINE)) - {"kNone"}
    named = [
        name for row in listed.splitlines() for name in re.findall(r"`(k\w+)`", row.split("|")[1])
    ]
    assert len(faults) > 5
    assert sorted(named) == sorted(faults)


def test_places_of_sequential_consistency_are_named() -> None:
    (sentence,) = re.findall(r"Sequential consistency is used in .*?\n\nIn each", TEXT, re.DOTALL)
    named = {ROOT / path for path in re.findall(r"`(csrc/\S+)`", sentence)}
    using = {
        path.with_suffix(".cpp")  # with its header
        for path in (ROOT / "csrc").rglob("*.*")
        if path.suffix in {".h", ".cpp"} and "memory_order_seq_cst" in path.read_text()
    }
    assert named == using


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile kernels/abi with")
@pytest.mark.parametrize(
    "claims",
    [header_claims, region_claims, flag_claims, slot_claims, word_claims, immediate_claims],
    ids=lambda claims: claims.__name__,
)
def test_numbers_are_those_of_the_code(claims: object, tmp_path: Path) -> None:
    assert callable(claims)
    found = claims()
    assert found
    headers = sorted((ROOT / "kernels/abi").glob("*.h"))
    lines = [f'#include "kernels/abi/{header.name}"' for header in headers]
    lines += [
        '#include "engine/imm_counter.h"',
        "#include <cstddef>",
        "using namespace moe_p2p::abi;",
    ]
    lines += [f'static_assert({claim}, "docs/protocol.md");' for claim in found]
    source = tmp_path / "claims.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT}", f"-I{ROOT}/csrc", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr
