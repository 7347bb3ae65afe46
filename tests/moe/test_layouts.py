"""One table of layouts: Python's lines are those of kernels/abi/layout.h."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from moe_p2p import DispatchOptions
from moe_p2p.moe.layouts import KERNELS, LAYOUTS, NAMES, RowLayout
from moe_p2p.moe.options import rows_of

HEADER = Path(__file__).resolve().parents[2] / "kernels" / "abi" / "layout.h"


def test_python_has_the_lines_of_the_header() -> None:
    text = HEADER.read_text()
    (numbers,) = re.findall(r"enum class RowLayout : i32 \{(.*)\};", text)
    number = {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+)", numbers)}
    assert list(number.values()) == list(range(len(LAYOUTS)))
    assert f"kNumLayouts = {len(LAYOUTS)};" in text
    assert re.findall(r"case RowLayout::(k\w+):", text) == list(number)
    lines = re.findall(r'return \{"(\w+)", RowLayout::(k\w+), ([\w, ]+)\};', text)
    assert [tuple(each) for each in LAYOUTS] == [
        (name, number[kernel], *(fact == "true" for fact in facts.split(", ")))
        for name, kernel, facts in lines
    ]


def test_names_are_the_values_of_the_option() -> None:
    assert NAMES == get_args(RowLayout) == tuple(each.name for each in LAYOUTS)
    for name in get_args(RowLayout):
        assert rows_of(DispatchOptions(layout=name).number).name == name


def test_layouts_that_share_a_kernel_lie_alike_but_for_their_room() -> None:
    for number, facts in enumerate(LAYOUTS):
        assert facts.per_token == LAYOUTS[facts.kernel].per_token
        assert facts.kernel <= number
    assert KERNELS[0] == 0
    assert all(LAYOUTS[kernel].kernel == kernel for kernel in KERNELS)
