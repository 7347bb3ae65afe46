"""A communicator: how ranks become one, and how it ends. AllToAll holds one, and makes the calls.

It owns the engine unless it was given, the C++ object (by number), the GPU's side and the masks.
Control path only. Symbols: W ranks, L ranks per node, E_local experts of this rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p import env, errors, library
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.lifetime import Closing
from moe_p2p.engine.transfers import bytes_from, tensor_from
from moe_p2p.fleet.bootstrap import Bootstrap, store_of
from moe_p2p.fleet.roll_call import roll_call
from moe_p2p.library import call, refuse_lazy
from moe_p2p.machine import driver, transport, tuned
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.kernels import DeviceSide
from moe_p2p.moe.gpu.partners import partners_of
from moe_p2p.moe.gpu.prepared import Combines, Dispatches, refuse_capture, usual_calls, when_traced
from moe_p2p.moe.options import QUANTIZE, gradient_of, partials_from, sum_order_of
from moe_p2p.moe.rendezvous import mirror, shared_memory
from moe_p2p.moe.rendezvous.agreement import Facts, Host, Offer, agree_on_transport, conclude
from moe_p2p.moe.shape import CommunicatorShape, forget_shape, remember_shape
from moe_p2p.moe.tuned import Shared

_ops = torch.ops.moe_p2p


def _close(comm: int, engine: Engine | None, device: DeviceSide | None) -> None:
    with ExitStack() as undo:
        if engine is not None:
            undo.callback(engine.close)
        if device is not None:
            undo.callback(device.close)  # NICs read its memory until the communicator is closed
        undo.callback(forget_shape, comm)
        try:
            if device is not None:
                device.finish()
        finally:
            _ops.all_to_all_close.default(comm)
            library.raise_interrupt()  # of a signal that ended the wait for partners early


def own_host() -> Host:
    """Where this rank is, for ranks that conclude who share memory."""
    return Host(call(_ops.host_identity.default), platform.node())


class Communicator:
    """One rank's end of a group of ranks. See AllToAll for the arguments."""

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        config: AllToAllConfig,
        rank: int | None,
        world_size: int | None,
        *,
        engine: Engine | None,
        masked: Tensor | None,
        gone: Callable[[int], bool],
    ) -> None:
        errors.require_type("config", config, AllToAllConfig, "an AllToAllConfig")
        self.config = config
        self._prepared = set[tuple[object, ...]]()  # calls whose kernels are there
        if engine is not None:
            errors.require_type("engine", engine, Engine, "an Engine or None")
            config.check_beside_engine()
        if config.on_gpu:
            refuse_capture("a communicator of this shape is not made: make it, or a call,")
        meeting = self._meet(group_or_store, rank, world_size, gone)
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self._masks = self._make_masks(masked, meeting.absent)
        self._tuned = tuned.find()
        with meeting, shared_memory.explained(self._shared_memory):
            own_engine = engine is None
            self.engine = self._choose_engine(meeting, engine)
            try:
                self.number = self._create(meeting)
            except BaseException:
                if own_engine:
                    self.engine.close()
                raise
            try:
                self.device = self._make_device(meeting)
                self.num_refused = meeting.num_refused
            except BaseException:
                _close(self.number, self.engine if own_engine else None, None)
                raise
            self._closing = Closing(
                self, _close, self.number, self.engine if own_engine else None, self.device
            )
            try:
                with self._stand_ins(meeting) as addresses:
                    call(
                        _ops.all_to_all_connect.default,
                        self.number,
                        [tensor_from(data, "address") for data in addresses],
                    )
                    if self.device is not None:
                        self.device.use_signals()
                        self.device.prepare(*usual_calls(config))
                        self.device.prepare_clean()
                    meeting.exchange(b"", "all ranks to be connected")
            except BaseException:
                self.close()
                raise

    def _meet(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        rank: int | None,
        world_size: int | None,
        gone: Callable[[int], bool],
    ) -> Bootstrap:
        """Returns the meeting: with masks, of the ranks that come."""
        config = self.config
        store, own, size = store_of(group_or_store, rank, world_size)
        if not config.mask_lost_ranks or size == 1 or config.ranks_per_node not in (None, 1, size):
            return mirror.meet(group_or_store, rank, world_size, timeout_s=config.timeout_s)
        timeout_s, what = float(config.timeout_s), "a communicator"
        present, among = roll_call(store, own, size, what=what, timeout_s=timeout_s, gone=gone)
        if len(present) == size:
            return mirror.meet(store, own, size, timeout_s=timeout_s)
        return Bootstrap(among, rank=own, world_size=size, timeout_s=timeout_s, present=present)

    @contextmanager
    def _stand_ins(self, meeting: Bootstrap) -> Iterator[list[bytes]]:
        """Yields the addresses of all ranks. An absent one of another node has none; of the
        own node, that of a communicator which the first rank makes and closes again, so that its
        shared memory is of a rank that is gone."""
        own = bytes_from(call(_ops.all_to_all_address.default, self.number))
        if not meeting.absent or self.ranks_per_node < self.world_size:
            of_ranks = meeting.exchange(own, mirror.ADDRESSES)
            yield [b"" if r in meeting.absent else each for r, each in enumerate(of_ranks)]
            return
        with ExitStack() as undo:
            addresses = {self.rank: own.hex()}
            for rank in meeting.absent if self.rank == meeting.ranks[0] else ():
                settings, masks = self._settings(rank=rank), self._masks and self._masks[1]
                made = int(
                    call(_ops.all_to_all_create.default, self.engine.number, settings, masks)
                )
                undo.callback(_ops.all_to_all_close.default, made)
                addresses[rank] = bytes_from(call(_ops.all_to_all_address.default, made)).hex()
            of_all = dict[str, str]()
            for said in meeting.exchange(json.dumps(addresses).encode(), mirror.ADDRESSES):
                of_all |= json.loads(said)
            yield [bytes.fromhex(of_all[str(rank)]) for rank in range(self.world_size)]

    def _shared_memory(self) -> str:
        """Returns what the communicator needs of /dev/shm, in a sentence."""
        made = getattr(self, "engine", None)  # an engine that is not yet made has software NICs
        software = made is None or made.provider in transport.SOFTWARE
        num_nics = (self.config.nics_per_rank or 2) if made is None else made.num_nics
        local = getattr(self, "ranks_per_node", self.config.ranks_per_node or self.world_size)
        sizes = shared_memory.of_a_rank(
            self.config,
            world_size=self.world_size,
            ranks_per_node=local,
            num_nics=num_nics if software else 0,
        )
        ranks = self.world_size if software else local
        total = ranks * sum(sizes.values()) / shared_memory.MIB
        need = f"The {ranks} ranks of this communicator need {total:.1f} MiB there in all"
        return f"{need} (python -m moe_p2p plan); chunk_tokens and steps_in_flight lower that"

    def _make_masks(self, given: Tensor | None, absent: list[int]) -> tuple[Tensor, Tensor] | None:
        """Returns the masks of the calls and of the NICs: the same on the CPU, two on a GPU."""
        if not self.config.mask_lost_ranks:
            errors.require(given is None, "masked is given, and mask_lost_ranks is False; set it")
            return None
        with torch.inference_mode(False):  # calls and users write to it in any mode
            on_host = torch.zeros(self.world_size, dtype=torch.int32, device="cpu")
            if given is None:
                given = on_host.to(self.config.device)
        fits = given.shape == (self.world_size,) and given.dtype == torch.int32
        errors.require(
            fits and given.is_contiguous() and given.device.type == str(self.config.device),
            f"masked is {given.dtype} {tuple(given.shape)} on {given.device}, must be int32 "
            f"({self.world_size},) on {self.config.device}, contiguous",
        )
        refuse_lazy(masked=given)
        if absent:
            on_host[absent], given[absent] = 1, 1
            if given.is_cuda:  # calls read it on any stream
                torch.cuda.current_stream().synchronize()
        return given, on_host if self._on_gpu else given

    def _make_device(self, meeting: Bootstrap) -> DeviceSide | None:
        num_local = self.ranks_per_node
        if not self._on_gpu:
            return None
        provider = self.engine.provider
        config = self._shared.on_gpu(self.config, self.world_size, num_local, provider)
        node, local = divmod(self.rank, num_local)
        num_nodes, first = self.world_size // num_local, node * num_local
        keys = meeting.exchange(secrets.token_hex(16).encode(), "keys for device memory")

        def among_node(data: bytes) -> list[bytes]:
            handles = meeting.exchange(data, "fabric handles")
            node_ranks = range(first, first + num_local)
            return [handles[rank] for rank in node_ranks if rank not in meeting.absent]

        return DeviceSide(
            self.number,
            config,
            meeting,
            device=torch.cuda.current_device(),
            ranks_per_node=num_local,
            key=keys[first].decode(),
            world=int(keys[0][:15], 16) | 1,
            partners=partners_of(
                self.engine, node, num_nodes, keys[local].decode(), meeting.absent
            ),
            exchange=among_node if env.fabric() else None,
            masks=self._masks,
            chosen=self._shared.chosen(self._tuned),
        )

    def _choose_engine(self, meeting: Bootstrap, given: Engine | None) -> Engine:
        """Returns the given engine, or makes one over the transport that all ranks agree on."""
        config = self.config
        if given is None:
            mine = transport.choose(config.transport, nics=config.nics)
        else:
            mine = transport.Choice(given.provider, "an engine was given", automatic=False)
        name = tuned.transport_name(
            mine.provider, config.provider_settings if given is None else given.opening.settings
        )
        shared = self._tuned.shared(name, str(config.device))
        offer = Offer(own_host().key, mine, shared)
        offers = [Offer.decode(d) for d in meeting.exchange(offer.encode(), "the transports")]
        errors.require(
            not meeting.absent
            or config.ranks_per_node == 1
            or len({other.host for other in offers}) == 1,
            f"ranks {meeting.absent} did not come, and ranks of several hosts are only connected "
            "without a rank where each is a node of its own: pass ranks_per_node=1, or see what "
            "they printed last and start all of them again",
        )
        self._shared = Shared.of(offers[0].tuned)
        choice = agree_on_transport(offers, config.ranks_per_node)
        if given is not None:
            return given
        neighbours = [rank for rank, other in enumerate(offers) if other.host == offer.host]
        gpu = driver.current_gpu() if config.on_gpu else None
        settings = config.transport_settings or env.transport_settings()
        if gpu is not None and (config.ranks_per_node or self.world_size) < self.world_size:
            settings = transport.with_copy_kernel(choice.provider, settings, gpu)
        engine = Engine(
            dataclasses.replace(config, transport=choice.provider, transport_settings=settings),
            label=f"rank {self.rank}",
            gpu=gpu,
            share=(neighbours.index(self.rank), len(neighbours)),
        )
        if choice.automatic:
            transport.announce(engine.label, choice, engine.opening)
        return engine

    def _create(self, meeting: Bootstrap) -> int:
        config = self._shared.with_parts(self.config, self.engine.provider)
        host = own_host()
        facts = Facts(
            fields=config.agreed(self._shared.bulk)
            | {"world_size": str(self.world_size), "arrival_flags": self.engine.arrivals},
            host=host.key,
            host_name=host.name,
            next_communicator=self.engine.next_communicator,
        )
        facts_of_all = [
            Facts.decode(d) for d in meeting.exchange(facts.encode(), "the configurations")
        ]
        agreed = conclude(facts_of_all, self.rank, config.ranks_per_node)
        self.engine.use_communicators(agreed.communicator + 1)
        self.ranks_per_node = agreed.ranks_per_node
        self.num_local_experts = config.num_local_experts(self.rank, self.world_size)
        num_threads = config.num_threads
        if num_threads is None:
            num_threads = max(1, len(os.sched_getaffinity(0)) // agreed.ranks_on_host)
        self._settings = functools.partial(
            config.settings,
            self.world_size,
            self.ranks_per_node,
            communicator=agreed.communicator,
            timeout_s=float(config.timeout_s),
            wait=config.wait,
            num_threads=num_threads,
            on_device=int(self._on_gpu),
            arrival_flags=self.engine.arrivals,
        )
        settings = self._settings(rank=self.rank)
        masks = self._masks[1] if self._masks is not None else None
        comm = int(call(_ops.all_to_all_create.default, self.engine.number, settings, masks))
        self.shape = CommunicatorShape(
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            num_local_experts=self.num_local_experts,
            hidden_dim=config.hidden_dim,
            topk=config.topk,
            chunk_tokens=config.step_tokens,
            masks=config.mask_lost_ranks,
        )
        remember_shape(comm, self.shape)
        return comm

    @property
    def _on_gpu(self) -> bool:
        return self.config.on_gpu

    @property
    def why_closed(self) -> str:
        """Why it cannot be used here; empty while it can."""
        return self._closing.why_closed

    def require_open(self) -> None:
        """For calls that no op refuses."""
        if self.why_closed:
            text = f"communicator {self.number} is closed"
            raise errors.make(errors.ClosedError, text)

    def close(self) -> None:
        self._closing()

    @property
    def masked(self) -> Tensor:
        """The masks of the calls."""
        if self._masks is None:
            text = "this communicator has no masks; make it with mask_lost_ranks=True"
            raise errors.make(errors.InvalidArgumentError, text)
        return self._masks[0]

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        self.require_open()
        masked, chosen = self.masked, list(ranks)
        for rank in chosen:
            errors.require(
                0 <= rank < self.world_size and rank != self.rank,
                f"rank {rank} cannot be masked by rank {self.rank} of {self.world_size}, "
                "only another one",
            )
        for rank in chosen:
            masked[rank].fill_(1)

    # What must be compiled before a call runs on a GPU.

    def prepare(self, dispatches: Dispatches, combines: Combines) -> None:
        self.require_open()
        if self.device is not None:
            self.device.prepare(dispatches, combines)

    @when_traced
    def prepare_dispatch(
        self, x_dtype: torch.dtype, options: int, trains: bool, x_bytes: int = 0
    ) -> None:
        key = x_dtype, options, trains, x_bytes
        if self.device is None or key in self._prepared:
            return
        self.device.prepare_dispatch(x_dtype, options, x_bytes)
        if trains and not options & QUANTIZE and x_dtype != torch.float8_e4m3fn:
            self.device.prepare_combine(x_dtype, x_dtype)
        self._prepared.add(key)

    @when_traced
    def prepare_combine(
        self, y_dtype: torch.dtype, out_dtype: torch.dtype, options: int, trains: bool
    ) -> None:
        key = y_dtype, out_dtype, options, trains
        if self.device is None or key in self._prepared:
            return
        by_topk = sum_order_of(options) > 0
        self.device.prepare_combine(y_dtype, out_dtype, by_topk, partials_from(options))
        if trains:
            self.device.prepare_dispatch(out_dtype, gradient_of(options))
        self._prepared.add(key)
