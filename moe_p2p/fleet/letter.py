"""Whether another process runs the same version of this package, as members ask each other.

The letter (csrc/letter.py) is made of the code that members must have in common. Used by member.py,
which adds it to each record, by moe_p2p.weights and by moe_p2p.kv.
"""

from __future__ import annotations

import torch

from moe_p2p.errors import ProtocolError, make


def letter() -> str:
    return str(torch.ops.moe_p2p.letter.default())


def check_letter(who: str, theirs: object) -> None:
    """theirs: the letter in a word of `who`; None: there is none."""
    ours = letter()
    if theirs != ours:
        text = f"{who} runs another version of moe_p2p, letter {theirs}; this process has {ours}"
        raise make(ProtocolError, text)
