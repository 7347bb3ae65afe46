"""MoE calls, a KV request and updates of weights on one engine: the order in which a NIC gets them.

The software NIC writes it down (csrc/provider/loopback/trace.h): what it was given in which call,
and what it has ended. A class is known by the connection, so that a request whose priority the
engine ignores is seen as what it is.
"""

from __future__ import annotations

import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_p2p import Engine, EngineConfig, kv
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer
from tests.support.cases import check_step, make, make_tokens
from tests.support.kv_fakes import cache_of
from tests.support.kv_workers import QUICK, random_cache, some_pages
from tests.support.ranks import Rank

NICS, UPDATES = 2, 3
# Slow, and with few writes in flight: MoE calls meet lower classes that still have some to post.
SETTINGS = "gbps=0.4,latency_us=300,max_in_flight=64"
QUANTUM, LOWER_BYTES, PIECE_BYTES, PATIENCE_S = 16, 256 << 10, 16 << 10, 0.01
POSTED, ENDED, FULL = range(3)

LAYERS, PAGES, TOKENS = 4, 64, 200
KV = kv.KVLayout(
    (kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=256, v_bytes=256, page_size=4),)
)
# `rows`: 1,024 rows apart from each other at the engine rank. `dense`: one write, were it not cut.
SOURCE = WeightLayout([Param(n, (1024, 512), "float32", (0,)) for n in ("rows", "dense")], 1)
TARGET = WeightLayout(
    [
        Param("rows", (1024, 512), "float32", (0,), strides=(640, 1)),
        Param("dense", (1024, 512), "float32", (0,)),
    ],
    1,
)


class Entry(NamedTuple):
    batch: int
    nbytes: int
    kind: int
    priority: int


def entries_of(path: Path) -> list[Entry]:
    words = array("I")
    with path.open("rb") as file:
        words.frombytes(file.read(16))
        count = words[0]
        words.frombytes(file.read(16 * count))
    found = []
    for at in range(4, 4 * (count + 1), 4):
        batch, nbytes, kinds = words[at : at + 3]
        found.append(Entry(batch, nbytes, kinds & 0xFF, kinds >> 8 & 0xFF))
    return found


class Order:
    """Reads one NIC's entries, and keeps what they break and what they show."""

    def __init__(self, entries: list[Entry], elapsed_s: float) -> None:
        self.wrong: list[str] = []
        self.posted_bytes = [0, 0, 0]
        # Posts of each class while a more urgent one had work, and batches that were full of them.
        self.beside = [0, 0, 0]
        self.full_batches = 0
        self._in_flight = [[0, 0] for _ in range(3)]  # writes, bytes
        self._cut_short = False  # the NIC took not all: what is left was chosen before
        self._used = 3
        turned = 0
        batch: list[Entry] = []
        for entry in entries:
            if batch and entry.batch != batch[0].batch:
                turned += self._batch(batch)
                batch = []
            if entry.kind == ENDED:
                self._add(entry, -1)
            else:
                batch.append(entry)
                self._post(entry)
        turned += self._batch(batch) if batch else 0
        # A class goes before a more urgent one when it had no turn for so long, and then once.
        if turned > 2 * (elapsed_s / PATIENCE_S + 1):
            self.wrong.append(f"{turned} batches begin with lower classes, in {elapsed_s:.2f} s")

    def _add(self, entry: Entry, sign: int) -> None:
        self._in_flight[entry.priority][0] += sign
        self._in_flight[entry.priority][1] += sign * entry.nbytes

    def _post(self, entry: Entry) -> None:
        if entry.kind == FULL:
            return
        own = entry.priority
        self._add(entry, 1)
        self.posted_bytes[own] += entry.nbytes
        urgent = next((p for p in range(own) if self._in_flight[p][0]), None)
        if urgent is None or self._cut_short:
            return
        self.beside[own] += 1
        lower = sum(nbytes for _, nbytes in self._in_flight[urgent + 1 :])
        if lower > LOWER_BYTES:
            self.wrong.append(f"batch {entry.batch}: {lower} bytes in flight below class {urgent}")
        if entry.nbytes > PIECE_BYTES:
            self.wrong.append(f"batch {entry.batch}: a write of {entry.nbytes} below {urgent}")

    def _batch(self, batch: list[Entry]) -> bool:
        """Between two calls of post with lower classes in them the engine looks for urgent work.
        Returns whether a lower class went before a more urgent one."""
        classes = [entry.priority for entry in batch if entry.kind == POSTED]
        self._used = min([self._used, *classes])
        lower = sum(each > self._used for each in classes)
        if lower > QUANTUM:
            self.wrong.append(f"batch {batch[0].batch}: {lower} posts of lower classes at once")
        self.full_batches += lower == QUANTUM
        inverted = classes != sorted(classes) and not self._cut_short
        self._cut_short = any(entry.kind == FULL for entry in batch)
        return inverted


class Scene:
    """Two engines with all three uses each; MoE calls go on until the others have ended."""

    def __init__(self, stack: ExitStack, pool: ThreadPoolExecutor, trace: Path) -> None:
        self.pool = pool
        ways = (f"{SETTINGS},trace={trace}", SETTINGS)
        self.engines = [
            stack.enter_context(
                Engine(
                    EngineConfig(transport="loopback", nics_per_rank=NICS, transport_settings=each),
                    label=f"engine {number}",
                )
            )
            for number, each in enumerate(ways)
        ]
        self.ended = 0  # of the two that MoE calls are beside

    def all_of_it(self) -> None:
        moe, others = HashStore(), HashStore()
        ranks = [self.pool.submit(self.moe, Rank(number, 2, moe)) for number in range(2)]
        moe.wait(["step 2"])  # class 0 has been used
        beside = [self.pool.submit(each, others) for each in (self.request, self.update)]
        for each in [*beside, *ranks]:
            each.result(120)

    def moe(self, rank: Rank) -> None:
        with make(rank, engine=self.engines[rank.rank], ranks_per_node=1) as comm:
            for step in range(1, 100_000):
                if rank.rank == 0:
                    rank.store.set(f"step {step}", "goes on" if self.ended < 2 else "last")
                check_step(comm, [make_tokens(step % 7, r, 12) for r in range(2)])
                if rank.store.get(f"step {step}") == b"last":
                    return

    def request(self, store: Any) -> None:
        with ExitStack() as stack:
            workers: list[Any] = []
            for kind, engine in zip((kv.KVSender, kv.KVReceiver), self.engines, strict=True):
                worker = kind(engine, cache_of(KV, 0, PAGES), instance=kind.role, timeouts=QUICK)
                stack.enter_context(kv.LeaseKeeper(worker, kv.TorchLeases(store, QUICK.lease_s)))
                workers.append(worker)
            sender, receiver = workers
            sender.wait_for("receiver")
            receiver.wait_for("sender")
            random_cache(sender.cache, 3)
            ours, theirs = (some_pages(TOKENS // 4, PAGES, seed) for seed in (1, 2))
            for number in range(4):
                name = f"r{number}"
                reservation = receiver.reserve(name, "sender", {"kv": theirs}, total=TOKENS)
                sending = sender.start(name, "receiver", {"kv": ours}, total=TOKENS)
                for layer in range(LAYERS):
                    sending.layer(layer)
                sending.commit()
                reservation.wait(30)
                sending.wait(30)
            sent, got = (
                worker.cache.tensors[0].view(LAYERS, PAGES, -1)[:, pages.long()]
                for worker, pages in ((sender, ours), (receiver, theirs))
            )
            assert torch.equal(sent, got)
        self.ended += 1

    def update(self, store: Any) -> None:
        tensors = {name: torch.randn(1024 * 512) for name in ("rows", "dense")}
        live = {"rows": torch.zeros(1024 * 640), "dense": torch.zeros(1024 * 512)}
        making = self.pool.submit(WeightTrainer, self.engines[0], store, SOURCE, 0, tensors)
        engine_rank = WeightEngineRank(self.engines[1], store, TARGET, 0, live)
        trainer = making.result(60)
        for version in range(1, UPDATES + 1):
            updating = self.pool.submit(trainer.update, version)
            engine_rank.wait()
            updating.result(60)
        assert torch.equal(live["dense"], tensors["dense"])
        assert torch.equal(live["rows"].view(1024, 640)[:, :512].flatten(), tensors["rows"])
        trainer.close()
        engine_rank.close()
        self.ended += 1


def orders(trace: Path, *, mutated: bool = False) -> list[Order]:
    began = time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        scene = Scene(stack, pool, trace)
        if mutated:
            engine: Any = scene.engines[0]
            write = engine.write_all
            engine.write_all = lambda *args, **how: write(*args, **{**how, "priority": 0})
        scene.all_of_it()
    elapsed = time.monotonic() - began
    return [Order(entries_of(Path(f"{trace}.{nic}")), elapsed) for nic in range(NICS)]


@pytest.mark.timeout(400)
def test_moe_goes_before_kv_and_kv_before_weights(tmp_path: Path) -> None:
    found = orders(tmp_path / "trace")
    assert [order.wrong for order in found] == [[], []]
    # Weights and KV were what they are said to be, and beside more urgent work.
    sent = [sum(each) for each in zip(*(order.posted_bytes for order in found), strict=True)]
    assert sent[2] >= UPDATES * 2 * 1024 * 512 * 4
    assert sent[1] >= LAYERS * TOKENS * KV.groups[0].heads * 512
    assert sent[0] > 0
    for own in (1, 2):
        assert sum(order.beside[own] for order in found) > 0
    assert all(order.full_batches > 0 for order in found)


@pytest.mark.timeout(400)
def test_an_engine_that_ignores_priorities_is_caught(tmp_path: Path) -> None:
    """Weights' requests are submitted as MoE's, over their own connections."""
    assert any(order.wrong for order in orders(tmp_path / "trace", mutated=True))
