"""What the polling thread of an engine did: `Engine.record`, event by event.

The recorder is csrc/base/recorder.h. A row of `Recording.events` has five int64: the time in ns of
the steady clock (`time.monotonic_ns`), then `head` and a, b, c. `decoded` gives an Event of each.

    head    bits 0-7 kind, 8-15 nic, 16-31 detail, 32-63 peer; a, b and c by kind:

    kind          nic    detail         peer       a           b           c
    1 doorbell    slot   comm, phase,   target     step        size word   place word
                         part           rank
    2 posted      NIC    1 imm, 2 read, number at  id          bytes       immediate
                         4 flag         this NIC
    3 refused     NIC    0              0          given       taken       0
    4 completed   NIC    base::Code     0          id          how many    the provider's detail
    5 immediate   NIC    1 counted,     source     immediate   0           0
                         0 dropped      rank
    6 farewell    0      0              its rank   word        0           0
    7 published   slot   comm, phase,   source     step        word        1 with the last part
                         parts here     rank
    8 span        0      0, phase,      0          step        end, ns     0
                         part

A span is a part of a call on a host (part 0 sends, 1 receives), in the recording of a communicator
(`all_to_all_record`) and in no engine's; its time is that of its beginning.
Doorbells, farewells and published arrivals are of communicators; detail then has the communicator
in bits 0-8, the phase (0 dispatch, 1 combine, 2 late weights) in 9-10, and the part in 11-13. All
others are of the engine, whoever uses it: KV, weights, MoE. An id is the same for all posts of a
request and their completions, and may come again once all of these are completed. `posted` has the
time before the post, every other event the time at which the thread saw it. An immediate has its
number's meaning by moe_p2p/engine/README.md; of a communicator it is `imm_key`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from moe_p2p.engine.transfers import NicCounters

KINDS = ("", "doorbell", "posted", "refused", "completed", "immediate", "farewell", "published",
         "span")  # fmt: skip
PHASES = ("dispatch", "combine", "weights", "counts")
_KEYED = 1 << 31
_WORD = (1 << 64) - 1


class Event(NamedTuple):
    """One row; the table above says what each kind has in it."""

    time_ns: int
    kind: str
    nic: int
    detail: int
    peer: int
    a: int
    b: int
    c: int

    @property
    def lane(self) -> tuple[int, str, int]:
        """Of a doorbell or a published arrival: communicator, phase, part."""
        return self.detail & 0x1FF, PHASES[self.detail >> 9 & 3], self.detail >> 11


class ImmKey(NamedTuple):
    """A communicator's immediate (csrc/engine/imm_counter.h). Phase "counts" has no steps."""

    communicator: int
    phase: str
    slot: int
    part: int
    is_last: bool
    source: int


@dataclass(frozen=True)
class Recording:
    """Events of one engine, the oldest first."""

    events: Tensor  # [n, 5] int64
    overwritten: int  # earlier ones that are gone
    counters: list[NicCounters]  # since the engine was made, up to the last event and no further
    from_start: bool = False  # nothing was posted, and nothing arrived, before the first event

    def decoded(self) -> list[Event]:
        return [decode(row) for row in self.events.tolist()]


def decode(row: list[int]) -> Event:
    head = row[1]
    kind = KINDS[head & 0xFF]
    a, b, c = (word & _WORD for word in row[2:])
    return Event(
        row[0], kind, head >> 8 & 0xFF, head >> 16 & 0xFFFF, head >> 32 & 0xFFFFFFFF, a, b, c
    )


def imm_key(imm: int) -> ImmKey | None:
    """Returns what a communicator's immediate means; None for one of other users."""
    if not imm & _KEYED:
        return None
    return ImmKey(
        communicator=imm >> 22 & 0x1FF,
        phase=PHASES[imm >> 20 & 3],
        slot=imm >> 16 & 15,
        part=imm >> 14 & 3,
        is_last=bool(imm >> 13 & 1),
        source=imm & 0x1FFF,
    )
