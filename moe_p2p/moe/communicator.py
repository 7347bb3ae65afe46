"""A communicator: how ranks become one, and how it ends. AllToAll holds one, and makes the calls.

It is the face: what stays while ranks come and go. It owns the engine unless it was given, the
GPU's side, and the epoch that is entered (epoch.py), whose C++ object its number names; of a world
that changes also that world (elastic.py).
Control path only. Symbols: W ranks, L ranks per node, E_local experts of this rank.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p import env, errors, library
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.lifetime import Closing
from moe_p2p.engine.metrics import Family, note
from moe_p2p.fleet.bootstrap import Bootstrap, store_of
from moe_p2p.fleet.client import StoreError
from moe_p2p.fleet.roll_call import roll_call
from moe_p2p.library import call, refuse_lazy
from moe_p2p.machine import driver, transport, tuned
from moe_p2p.moe import counts
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.elastic import Changes, Joining
from moe_p2p.moe.epoch import Epoch, Masks, make_epoch, own_host
from moe_p2p.moe.gpu.epoch_memory import EpochMemory, Sharers
from moe_p2p.moe.gpu.kernels import DeviceSide
from moe_p2p.moe.gpu.partners import partners_of
from moe_p2p.moe.gpu.prepared import Combines, Dispatches, refuse_capture, usual_calls, when_traced
from moe_p2p.moe.options import QUANTIZE, gradient_of, partials_from, sum_order_of
from moe_p2p.moe.rendezvous import mirror, shared_memory
from moe_p2p.moe.rendezvous.agreement import Offer, agree_on_transport
from moe_p2p.moe.rendezvous.mirror import sharing_of
from moe_p2p.moe.shape import CommunicatorShape, forget_shape, remember_shape
from moe_p2p.moe.tuned import Shared

_ops = torch.ops.moe_p2p


def _close(
    comm: int,
    engine: Engine | None,
    device: DeviceSide | None,
    changes: Changes | None,
    ended: list[Callable[[], None]],
) -> None:
    """ended: of the epoch that is entered then (Epoch.ended)."""
    with ExitStack() as undo:
        if engine is not None:
            undo.callback(engine.close)
        if changes is not None:
            undo.callback(changes.close)
        if device is not None:
            undo.callback(device.close)  # NICs read its memory until the communicator is closed
        undo.callback(forget_shape, comm)
        try:
            if device is not None:
                device.finish()
        finally:
            _ops.all_to_all_close.default(comm)
            ended[0]()
            library.raise_interrupt()  # of a signal that ended the wait for partners early


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
        joining: Joining | None = None,
    ) -> None:
        errors.require_type("config", config, AllToAllConfig, "an AllToAllConfig")
        self.config = config
        self._prepared = set[tuple[object, ...]]()  # calls whose kernels are there
        if engine is not None:
            errors.require_type("engine", engine, Engine, "an Engine or None")
            config.check_beside_engine()
        if config.on_gpu:
            refuse_capture("a communicator of this shape is not made: make it, or a call,")
        self._tuned = tuned.find()
        self._changes: Changes | None = None
        self.device: DeviceSide | None = None
        self.num_refused = 0
        self.late: Tensor | None = None  # ReadyRows.late of all its calls
        self._engine, self._own_engine = engine, engine is None
        if joining is not None:
            self._join(group_or_store, rank, world_size, joining, masked, gone)
            return
        meeting = self._meet(group_or_store, rank, world_size, gone)
        self.rank, self.world_size = meeting.rank, meeting.world_size
        masks = self._make_masks(masked, meeting.absent)
        with meeting, shared_memory.explained(self._shared_memory):
            try:
                epoch = self._create(meeting, masks)
            except BaseException:
                self._close_own_engine()
                raise
            self._face(epoch, meeting.name)
            try:
                epoch = self._share(epoch, meeting)
                self.num_refused = meeting.num_refused
            except BaseException:
                engine = self._engine if self._own_engine else None
                _close(self.number, engine, None, None, self._ended)
                raise
            self._closes()
            try:
                self._connect(epoch, meeting)
                meeting.exchange(b"", "all ranks to be connected")
            except BaseException:
                self.close()
                raise

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "made with the first epoch"
        return self._engine

    def _close_own_engine(self) -> None:
        if self._own_engine and self._engine is not None:
            self._engine.close()

    def _face(self, epoch: Epoch, name: str) -> None:
        """What calls look at, of the first epoch; all later ones are alike. name: of the meeting"""
        self.name = name
        self.number, self.ranks_per_node, self._masks = epoch[:3]
        self._ended = [epoch.ended]
        config = self.config
        self.num_local_experts = config.num_local_experts(self.rank, self.world_size)
        self.shape = CommunicatorShape(
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            num_local_experts=self.num_local_experts,
            hidden_dim=config.hidden_dim,
            topk=config.topk,
            chunk_tokens=config.step_tokens,
            masks=config.mask_lost_ranks or self._changes is not None,
            poisons=self.poisons(),
        )
        remember_shape(self.number, self.shape)

    def _closes(self) -> None:
        engine = self._engine if self._own_engine else None
        more = self.device, self._changes, self._ended
        self._closing = Closing(self, _close, self.number, engine, *more)
        note(self)

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

    # --- a world that changes ---

    def _join(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        rank: int | None,
        world_size: int | None,
        joining: Joining,
        masked: Tensor | None,
        gone: Callable[[int], bool],
    ) -> None:
        """Makes this face of the first epoch that calls this process."""
        text = "masked is given, and a world that changes has masks for each epoch: read .masked"
        errors.require(masked is None, text)
        store, self.rank, self.world_size = store_of(group_or_store, rank, world_size)
        self._changes = changes = Changes(store, self.rank, self.world_size, self.config)
        try:
            with shared_memory.explained(self._shared_memory):
                self._face(changes.begin(joining, self._stage, gone), "a world that changes")
            if self.device is not None:
                self.device.look_out(self.rank)
        except BaseException:
            self._close_own_engine()
            changes.close()
            raise
        self._closes()

    def _stage(self, meeting: Bootstrap, lead: int) -> Epoch:
        """Makes an epoch of the ranks that meet, beside steps. lead: the rank whose figures count
        where ranks have measured different ones."""
        with nullcontext() if self.device is None else self.device.current():
            return self._staged(meeting, lead)

    def _staged(self, meeting: Bootstrap, lead: int) -> Epoch:
        epoch = self._create(meeting, self._epoch_masks(meeting.absent), lead)
        try:
            known = getattr(self, "ranks_per_node", epoch.ranks_per_node)
            errors.require(
                epoch.ranks_per_node == known,
                f"nodes have {epoch.ranks_per_node} ranks with those that come, and {known} before;"
                " pass ranks_per_node",
            )
            epoch = self._share(epoch, meeting)
            epoch.connect(meeting)
            if self.device is not None:
                assert epoch.memory is not None
                self.device.use_signals(epoch.memory)
                if hasattr(self, "number"):
                    self._check_flags(epoch)
                else:
                    self._begin(self.device, epoch.memory)
            meeting.exchange(b"", "all ranks to be connected")
        except BaseException:
            epoch.close()
            raise
        return epoch

    def _check_flags(self, epoch: Epoch) -> None:
        """How arrivals are seen is compiled into kernels, which graphs hold."""
        one, other = (
            str(_ops.all_to_all_arrival_flags.default(number))
            for number in (epoch.number, self.number)
        )
        text = f"arrivals are seen by {one!r} with the ranks that come, and by {other!r} before"
        errors.require(one == other, f"{text}; name it in transport_settings: arrival_flags=relay")

    def _enter(self, epoch: Epoch) -> Callable[[], None]:
        """Makes the calls those of this epoch. Returns what closes the one before."""
        device = self.device
        # That number names the epoch before, once its own is entered.
        memory = None if device is None else device.memory
        before = epoch._replace(ended=self._ended[0], memory=memory)
        if device is None:
            call(_ops.all_to_all_enter.default, self.number, epoch.number)
            self._ended[0] = epoch.ended
            return before.close
        assert epoch.memory is not None
        leave = device.enter(epoch.memory)
        self._ended[0] = epoch.ended

        def close() -> None:
            try:
                leave()
            finally:
                before.close()

        return close

    def stage_members(self, add: Iterable[int], remove: Iterable[int]) -> None:
        self._changing().stage(add, remove, self._stage)

    def staged(self) -> bool:
        return self._changing().staged()

    def commit_members(self) -> None:
        changes = self._changing()
        if self._on_gpu:
            refuse_capture("members are to be committed")
        try:
            epoch = changes.commit(self._enter)
        except StoreError:
            if changes.in_doubt:  # it cannot know whether to stay
                self.close()
            raise
        except errors.AbortedError:
            if changes.is_out and not changes.may_return:
                self.close()
            raise
        if epoch is None:
            self.close()
        else:
            self._masks = epoch.masks

    def _changing(self) -> Changes:
        if self._changes is None:
            text = "this world is fixed; make it with members= (its first ranks) or join=True"
            raise errors.make(errors.InvalidArgumentError, text)
        if self.why_closed:
            raise errors.make(errors.ClosedError, f"rank {self.rank}: the communicator is closed")
        return self._changes

    def check_member(self) -> None:
        """Raises where the world goes on without this rank, and where a product has waited in vain
        for rows (ready.py)."""
        if self._changes is not None:
            self._changes.world.check()
        if self.late is not None and (late := int(self.late)):
            counter, value = (late >> 32) - 1, late & 0xFFFFFFFF
            text = (
                f"rank {self.rank}: counter {counter} of `received.ready` stands at {value}, less "
                f"than is awaited: rows did not arrive in {self.config.timeout_s} s at the product "
                "that waits for them, whose results are NaN. Is dispatch_recv called before the "
                "product, which is on another stream, and are its multiprocessors left to it?"
            )
            raise errors.make(errors.TimeoutError, text)

    def poisons(self) -> bool:
        """Whether sums that lack what a lost rank had to send are NaN."""
        return self.config.lost == "poison" or (
            self.config.lost is None and self._changes is not None
        )

    @property
    def lost_tokens(self) -> int:
        if self.device is not None and not self.device.counts_lost:
            text = "lost tokens are counted on GPUs where the configuration has lost='drop' or "
            raise errors.make(errors.UnavailableError, f"{text}'poison', with mask_lost_ranks=True")
        return int(call(_ops.all_to_all_lost.default, self.number))

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text."""
        if self.why_closed:
            return []
        on_device = None if self.device is None else self.device.glance()
        on_host = 0 if self._masks is None else int(self._masks[1].ne(0).sum())
        return counts.families_of(
            self.number,
            self.rank,
            epoch=0 if self._changes is None else self._changes.world.epoch,
            masked=on_host if on_device is None else len(on_device.masked),
            refused=self.num_refused,
            device=on_device,
        )

    def _shared_memory(self) -> str:
        """Returns what the communicator needs of /dev/shm, in a sentence."""
        made = self._engine  # an engine that is not yet made has software NICs
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

    def _make_masks(
        self, given: Tensor | None, absent: list[int], *, always: bool = False
    ) -> Masks | None:
        """always: also where lost ranks are not masked, for those that are absent."""
        if not (self.config.mask_lost_ranks or always):
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

    def _epoch_masks(self, absent: list[int]) -> Masks | None:
        """On a GPU kernels have one for all epochs, and each epoch's NICs their own."""
        if not self._on_gpu:
            return self._make_masks(None, absent, always=True)
        masks = self._make_masks(None, [], always=True) if self.device is None else None
        of_kernels = masks[0] if masks is not None else self.device.masks  # type: ignore[union-attr]
        assert of_kernels is not None
        with torch.inference_mode(False):
            of_nics = torch.zeros(
                self.world_size, dtype=torch.int32, device="cpu", pin_memory=self.config.on_gpu
            )
        of_nics[absent] = 1
        return of_kernels, of_nics

    def _share(self, epoch: Epoch, meeting: Bootstrap) -> Epoch:
        """Returns the epoch with memory of the GPU that its ranks share; first, makes that side."""
        if not self._on_gpu:
            return epoch
        sharers = self._sharers(meeting, epoch.ranks_per_node)
        masks = (None, None) if epoch.masks is None else epoch.masks
        if self.device is None:
            local, provider = epoch.ranks_per_node, self.engine.provider
            self.device = DeviceSide(
                self._shared.on_gpu(self.config, self.world_size, local, provider),
                sharers,
                device=torch.cuda.current_device(),
                world_size=self.world_size,
                ranks_per_node=local,
                masks=masks[0],
                chosen=self._shared.chosen(self._tuned),
                changes=self._changes is not None,
            )
        memory = self.device.share(epoch.number, meeting, sharers, masks[1])
        return epoch._replace(memory=memory)

    def _connect(self, epoch: Epoch, meeting: Bootstrap) -> None:
        """Of a fixed world."""
        epoch.connect(meeting)
        if self.device is not None:
            assert epoch.memory is not None
            self.device.use_signals(epoch.memory)
            self._begin(self.device, epoch.memory)
            self.device.look_out(self.rank)

    def _begin(self, device: DeviceSide, memory: EpochMemory) -> None:
        device.begin(memory)
        device.prepare(*usual_calls(self.config))
        device.prepare_clean()

    def _sharers(self, meeting: Bootstrap, num_local: int) -> Sharers:
        node, local = divmod(self.rank, num_local)
        num_nodes, first = self.world_size // num_local, node * num_local
        keys = meeting.exchange(secrets.token_hex(16).encode(), "keys for device memory")

        def among_node(data: bytes) -> list[bytes]:
            handles = meeting.exchange(data, "fabric handles")
            node_ranks = range(first, first + num_local)
            return [handles[rank] for rank in node_ranks if rank not in meeting.absent]

        absent_nodes = [n for n in range(num_nodes) if n * num_local in meeting.absent]
        key = f"{keys[local].decode()}.{local}"
        return Sharers(
            sharing_of(meeting, num_local, keys[first].decode()),
            world=int(keys[0][:15], 16) | 1,
            partners=partners_of(self.engine, node, num_nodes, key, absent_nodes),
            exchange=among_node if env.fabric() else None,
        )

    def _create(self, meeting: Bootstrap, masks: Masks | None, lead: int = 0) -> Epoch:
        """Agrees on the transport, with an engine of it, and makes the C++ object."""
        if not hasattr(self, "_mine"):
            self._mine = self._preferred()
        offer = Offer(own_host().key, self._mine, self._measured())
        offers = [Offer.decode(d) for d in meeting.exchange(offer.encode(), "the transports")]
        errors.require(
            self._changes is not None
            or not meeting.absent
            or self.config.ranks_per_node == 1
            or len({other.host for other in offers}) == 1,
            f"ranks {meeting.absent} did not come, and ranks of several hosts are only connected "
            "without a rank where each is a node of its own: pass ranks_per_node=1, or see what "
            "they printed last and start all of them again",
        )
        choice = agree_on_transport(offers, self.config.ranks_per_node)
        if not hasattr(self, "_shared"):
            self._shared = Shared.of(offers[lead].tuned)
        if self._engine is None:
            neighbours = [rank for rank, other in enumerate(offers) if other.host == offer.host]
            self._engine = self._make_engine(choice, neighbours)
        errors.require(
            choice.provider == self._engine.provider or not hasattr(self, "ranks_per_node"),
            f"the transport is {choice.provider} with the ranks that come, and "
            f"{self._engine.provider} before; name one with transport=",
        )
        return make_epoch(
            meeting,
            self.config,
            self._engine,
            self._shared,
            masks,
            on_device=int(self._on_gpu),
            fixed_masks=int(masks is not None and not self.config.mask_lost_ranks),
            poison=int(self.poisons()),
        )

    def _preferred(self) -> transport.Choice:
        if self._engine is None:
            return transport.choose(self.config.transport, nics=self.config.nics)
        return transport.Choice(self._engine.provider, "an engine was given", automatic=False)

    def _measured(self) -> tuple[int, ...]:
        given, provider = self._engine, self._mine.provider
        name = tuned.transport_name(
            provider,
            self.config.provider_settings
            if given is None or self._own_engine
            else given.opening.settings,
        )
        return self._tuned.shared(name, str(self.config.device))

    def _make_engine(self, choice: transport.Choice, neighbours: list[int]) -> Engine:
        """neighbours: ranks of this host, itself included."""
        config = self.config
        gpu = driver.current_gpu() if config.on_gpu else None
        settings = dataclasses.replace(config, transport=choice.provider).all_settings
        if config.transport == "auto" and choice.provider != self._mine.provider:
            settings = transport.for_any(settings)  # all are of one node, and these are for NICs
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
        masked, chosen = self.masked, errors.ranks_of("ranks", ranks)
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

    def _require_fixed(self, what: str) -> None:
        errors.require(
            not self.config.mask_lost_ranks and self._changes is None,
            f"{what} only where no rank is masked and the world does not change",
        )

    def prepare_ready(
        self, y_dtype: torch.dtype, out_dtype: torch.dtype, partials: int = 0
    ) -> None:
        """Of combines whose rows are still being written (ready.py)."""
        self._require_fixed("ready: combine begins before y is complete")
        if self.device is not None:
            self.device.prepare_ready(y_dtype, out_dtype, partials)

    def prepare_arriving(self, x_dtype: torch.dtype, options: int, x_bytes: int) -> None:
        """Of the receiving halves of dispatches that raise counters (ready.py)."""
        self._require_fixed("num_sms: dispatch_recv counts rows that arrive")
        if self.device is not None:
            self.device.prepare_arriving(x_dtype, options, x_bytes)
        if self.late is None:
            pinned = self.device is not None and self.device.pinned
            self.late = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)

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
