"""The worlds behind one `Buffer`: an AllToAll for each shape of calls, with a seat for each rank
that may come, and what connecting, masking and activating ranks means for them (docs/elastic.md,
section 11).

NIXL EP's calls name ranks before any call has a shape, so worlds are made at the first call of a
shape, by all ranks that are connected. A rank that comes later learns the shapes as it connects.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from moe_p2p import errors
from moe_p2p.deep_ep.low_latency import LowLatencyKey, form_of
from moe_p2p.deep_ep.low_latency_calls import LowLatencyCalls
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.neighbours import has_ended
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.epoch import own_host
from moe_p2p.moe.options import DispatchForm
from moe_p2p.moe.pool import ReleasingAllToAll
from moe_p2p.nixl_ep.meeting import Card, Meetings

# Deadline of ranks to connect, as NIXL EP's. Too short: a newcomer loads weights meanwhile.
CONNECT_S = 300.0
_PREFIX = "moe_p2p/nixl_ep"
_PAUSE_S = 0.002  # between two looks whether ranks are staged


class Shape(NamedTuple):
    """Of calls that share a world. local: ranks of a node."""

    hidden: int
    topk: int
    tokens: int
    dtype: str
    local: int


class Calls(LowLatencyCalls):
    """Low-latency calls over the worlds that `world_of` gives."""

    def __init__(
        self,
        world_of: Callable[[LowLatencyKey, torch.device], ReleasingAllToAll],
        experts_per_rank: int,
    ) -> None:
        super().__init__(lambda **_: None)  # each call checks its own world
        self._world_of, self._experts_per_rank = world_of, experts_per_rank

    def _make_low_latency(
        self, x: Tensor, key: LowLatencyKey
    ) -> tuple[ReleasingAllToAll, DispatchForm]:
        num_ranks = key[4][1] // self._experts_per_rank
        made = self._world_of(key, x.device), form_of(key, num_ranks)
        self._low_latency_made[key] = made
        return made

    @property
    def comm_stream(self) -> torch.cuda.Stream:
        return self._streams.comm

    def forget(self) -> None:
        """The worlds are closed: others are made."""
        self._low_latency_made.clear()


class Worlds:
    """num_ranks: seats. one_rank_nodes: all ranks talk over NICs, and may be on several hosts.

    Raises InvalidArgumentError for a rank that no seat has.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        experts_per_rank: int,
        *,
        timeout_s: float,
        one_rank_nodes: bool,
    ) -> None:
        self.rank, self.num_ranks, self.experts_per_rank = rank, num_ranks, experts_per_rank
        self._timeout_s, self._one_rank_nodes = timeout_s, one_rank_nodes
        self.connected = {rank}
        self._by_hand = set[int]()  # masked by the caller, or connected and not yet active
        self._applied = set[int]()  # those of them that the worlds have masked
        self._staged = set[int]()  # connected, and in the worlds once these are committed
        self._meetings = Meetings(rank)
        self._processes: dict[int, str] = {}  # by rank, that have met this one
        self._home: Store | None = None  # of the worlds: that of the first connect_ranks
        self._token = ""
        self._local = 0  # ranks of a node
        self._made: dict[Shape, ReleasingAllToAll] = {}
        self._alone_made: dict[Shape, ReleasingAllToAll] = {}
        here = weakref.proxy(self)  # which ends with its buffer, without a collection of cycles
        self._calls = Calls(lambda *call: here._world_of(*call), experts_per_rank)
        self._alone = Calls(lambda *call: here._alone_of(*call), experts_per_rank)

    # --- who is there ---

    @property
    def bound(self) -> int:
        """One more than the highest rank that takes part."""
        return max(self.connected - self._by_hand) + 1

    def lost(self) -> set[int]:
        """Connected ranks that a world has masked by itself."""
        masked = {
            r for made in self._made.values() for r in made.masked.nonzero().flatten().tolist()
        }
        return (masked & self.connected) - self._by_hand - {self.rank}

    def write_masks(self, status: Tensor) -> None:
        out = [int(r not in self.connected or r in self._by_hand) for r in range(self.num_ranks)]
        found = torch.tensor(out, dtype=torch.int32, device="cpu").to(status.device)
        for made in self._made.values():
            found = torch.maximum(found, made.masked.to(status.device))
        status.copy_(found)

    def check_ranks(self, ranks: Iterable[int], what: str) -> list[int]:
        given = sorted(errors.ranks_of(what, ranks))
        errors.require(bool(given), f"{what}: no rank is given")
        wrong = [r for r in given if not 0 <= r < self.num_ranks]
        text = f"{what}: there are no ranks {wrong}; update_memory_buffers has {self.num_ranks}"
        errors.require(not wrong, text)
        return given

    # --- connecting ---

    def connect(self, ranks: Sequence[int], store: Callable[[], Store], *, activate: bool) -> None:
        """Returns once all of `ranks` have connected this rank too."""
        given = set(self.check_ranks(ranks, "connect_ranks")) - {self.rank}
        lost = self.lost()
        fresh = {r for r in given if r not in self.connected or r in lost}
        if fresh:
            text = f"ranks {sorted(self._staged)} are connected and not active; unmask them first"
            errors.require(not self._staged, text)
            self._meet(fresh, store())
            text = (
                "connect_ranks(activate=False) is for ranks that come beside calls, and no call "
                "was made yet: connect them with activate=True, or later"
            )
            errors.require(activate or bool(self._made), text)
            self.connected |= fresh
            self._by_hand |= fresh
        if activate:
            self.unmask(given)

    def _meet(self, fresh: set[int], store: Store) -> None:
        deadline = Deadline(CONNECT_S)
        words = StoreKeys(store, _PREFIX)
        host = own_host()
        about: Card = {
            "seats": [self.num_ranks, self.experts_per_rank, self._one_rank_nodes],
            "host": [host.key, host.name],
            "token": self._token,
            "home": _address(self._home),
            "local": self._local,
            "shapes": list(self._made),
            "devices": [str(made.config.device) for made in self._made.values()],
            "epochs": [_epoch(made) for made in self._made.values()],
        }
        try:
            cards = self._meetings.meet(
                words, lambda: (self.connected - self.lost()) | fresh | {self.rank}, about, deadline
            )
            self._compare(cards)
            self._processes |= {rank: card["process"] for rank, card in cards.items()}
            there = self._members(cards)
            if not there:
                self._found(cards, store)
                return
            self._same_nodes(cards, there[0])
            if self.rank in there:
                self._stage(set(cards) - set(there), set(cards))
                self._staged = fresh if self._made else set()
            else:
                self._join(cards[there[0]], store)
        finally:
            words.client.close()

    def _compare(self, cards: dict[int, Card]) -> None:
        mine = cards[self.rank]["seats"]
        for rank, card in cards.items():
            text = (
                f"ranks differ: rank {self.rank} has num_ranks, num_experts_per_rank and "
                f"disable_ll_nvlink {mine}, rank {rank} has {card['seats']}; pass the same"
            )
            errors.require(card["seats"] == mine, text)
        tokens = {card["token"]: rank for rank, card in cards.items() if card["token"]}
        text = f"ranks {sorted(tokens.values())} are in worlds of their own; destroy one of these"
        errors.require(len(tokens) <= 1, text)

    def _members(self, cards: dict[int, Card]) -> list[int]:
        """The ranks whose worlds go on; all others come anew."""
        latest = max(card["epochs"] for card in cards.values())
        here = [r for r, card in cards.items() if card["token"] and card["epochs"] == latest]
        return sorted(here)

    def _found(self, cards: dict[int, Card], store: Store) -> None:
        """Nobody has worlds: they will be in this store, which all of these ranks have."""
        ids = ",".join(card["id"] for card in cards.values())
        hosts = {card["host"][0] for card in cards.values()}
        one_node = len(hosts) == 1 and not self._one_rank_nodes
        self._settle(hashlib.sha256(ids.encode()).hexdigest()[:16], _bare(store))
        self._local = self.num_ranks if one_node else 1

    def _settle(self, token: str, home: Store) -> None:
        self._token, self._home = token, home
        words = StoreKeys(home, _PREFIX)
        words.put(f"home/{token}", self.rank)
        words.client.close()

    def _same_nodes(self, cards: dict[int, Card], member: int) -> None:
        there = cards[member]
        others = [r for r, c in cards.items() if c["host"][0] != there["host"][0]]
        text = (
            f"ranks {others} are not on {there['host'][1]}, whose ranks share memory: pass "
            "disable_ll_nvlink=True on all ranks, for worlds that span hosts"
        )
        errors.require(there["local"] == 1 or not others, text)

    def _join(self, member: Card, store: Store) -> None:
        """Enters the worlds that the others have."""
        self._close_worlds()
        self._settle(member["token"], self._home_of(member, store))
        self._local = member["local"]
        for fields, device in zip(member["shapes"], member["devices"], strict=True):
            shape = Shape(*fields)
            self._made[shape] = self._make(shape, torch.device(device), join=True)

    def _home_of(self, member: Card, store: Store) -> Store:
        words = StoreKeys(_bare(store), _PREFIX)
        try:
            if words.get(f"home/{member['token']}") is not None:
                return _bare(store)
        finally:
            words.client.close()
        text = (
            "the ranks that are there met in another store, which has no address: pass that one, "
            "or TCPStores"
        )
        errors.require(bool(member["home"]), text)
        host, port = addresses.split(member["home"], "the address of the store of the worlds")
        return TCPStore(host, port, is_master=False)

    def _stage(self, new: set[int], ranks: set[int]) -> None:
        """Stages those that come, and returns when they are staged."""
        absent = set(range(self.num_ranks)) - ranks
        for made in self._made.values():
            made.stage_members(add=new, remove=absent)
        while not all(made.members_staged() for made in self._made.values()):
            time.sleep(_PAUSE_S)

    # --- masking ---

    def unmask(self, ranks: set[int]) -> None:
        """The first one for a staged rank commits: at members between the same two steps."""
        for rank in sorted(ranks):
            text = f"rank {rank} is not connected; connect_ranks connects it"
            errors.require(rank in self.connected, text)
        if ranks & self._staged:
            self._commit()
        missed = ranks & (self._applied | self.lost())
        text = (
            f"ranks {sorted(missed)} are masked and have missed calls; clean_mask_buffer, called "
            "by all ranks, takes back those that live"
        )
        errors.require(not missed, text)
        self._by_hand -= ranks

    def mask(self, rank: int) -> None:
        errors.require(rank != self.rank, f"rank {rank} cannot mask itself")
        if rank in self.connected:
            self._by_hand.add(rank)

    def _commit(self) -> None:
        staged, self._staged = self._staged, set()
        failed: errors.MoeP2pError | None = None
        for made in self._made.values():
            try:
                made.commit_members()
            except errors.MoeP2pError as error:
                failed = error  # no world stays staged
        self._applied.clear()
        if failed is not None:
            self.connected -= staged
            self._by_hand -= staged
            raise failed

    def disconnect(self, ranks: Sequence[int]) -> None:
        given = set(self.check_ranks(ranks, "disconnect_ranks"))
        wrong = sorted(given - (self.connected - {self.rank}))
        text = f"ranks {wrong} are not connected to rank {self.rank}, or are itself"
        errors.require(not wrong, text)
        if self._staged:
            self._commit()
        for made in self._made.values():
            made.mask_ranks(given)
        for these in (self.connected, self._by_hand, self._applied):
            these -= given

    def clean(self) -> None:
        """Takes back whoever is connected and lives, by a change of members without newcomers."""
        self._staged = set()
        for made in self._made.values():
            if not made.members_staged():
                made.stage_members(remove=set(range(self.num_ranks)) - self.connected)
            made.commit_members()
        self._by_hand.clear()
        self._applied.clear()

    # --- calls ---

    @property
    def comm_stream(self) -> torch.cuda.Stream:
        return self._calls.comm_stream

    def calls(self) -> Calls:
        """What serves calls now: where all others are masked by hand, a world of this rank."""
        if not self.connected - self._by_hand - {self.rank} and self.num_ranks > 1:
            return self._alone
        if new := self._by_hand - self._applied:
            for made in self._made.values():
                made.mask_ranks(new)
            self._applied |= new
        return self._calls

    def await_all(self) -> None:
        """An empty step: whoever does not come within the deadline is masked."""
        calls = self.calls()
        if calls is self._alone:
            return
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._made:
            shape, made = next(iter(self._made.items()))
            device = torch.device(made.config.device)
        else:
            shape = Shape(128, 1, 1, "bfloat16", self._local)
        x = torch.empty((0, shape.hidden), dtype=getattr(torch, shape.dtype), device=device)
        topk_idx = torch.empty((0, shape.topk), dtype=torch.int64, device=device)
        num_experts = self.bound * self.experts_per_rank
        calls.low_latency_dispatch(x, topk_idx, shape.tokens, num_experts, use_fp8=False)

    def _world_of(self, key: LowLatencyKey, device: torch.device) -> ReleasingAllToAll:
        shape = self._shape(key, self._local or self.num_ranks)
        made = self._made.get(shape)
        if made is None:
            made = self._made[shape] = self._make(shape, device)
            made.mask_ranks(self._applied)
        return made

    def _alone_of(self, key: LowLatencyKey, device: torch.device) -> ReleasingAllToAll:
        shape = self._shape(key, self.num_ranks)
        if shape not in self._alone_made:
            self._alone_made[shape] = ReleasingAllToAll(
                HashStore(),
                self._config(shape, device),
                rank=self.rank,
                world_size=self.num_ranks,
                members=[self.rank],
            )
        return self._alone_made[shape]

    def _shape(self, key: LowLatencyKey, local: int) -> Shape:
        dtype, _, hidden, topk, (tokens, *_) = key
        return Shape(hidden, topk, tokens, str(dtype).removeprefix("torch."), local)

    def _config(self, shape: Shape, device: torch.device) -> AllToAllConfig:
        return AllToAllConfig(
            num_experts=self.num_ranks * self.experts_per_rank,
            hidden_dim=shape.hidden,
            topk=shape.topk,
            max_tokens=shape.tokens,
            chunk_tokens=shape.tokens,
            dtype=getattr(torch, shape.dtype),
            device=device.type,
            ranks_per_node=shape.local,
            timeout_s=self._timeout_s,
            mask_lost_ranks=True,
            lost="drop",
        )

    def _make(self, shape: Shape, device: torch.device, *, join: bool = False) -> ReleasingAllToAll:
        members = self.connected - self.lost()
        who: dict[str, object] = {"join": True} if join else {"members": members}
        store = self._home or HashStore()
        return ReleasingAllToAll(
            PrefixStore(f"{_PREFIX}/{self._token}/{len(self._made)}", store),
            self._config(shape, device),
            rank=self.rank,
            world_size=self.num_ranks,
            gone=lambda rank: has_ended(self._processes.get(rank, "")),
            **who,
        )

    # --- its end ---

    def check(self) -> None:
        for made in self._made.values():
            made.check()

    def _close_worlds(self) -> None:
        for made in self._made.values():
            made.close()
        self._made.clear()
        self._applied.clear()
        self._calls.forget()

    def close(self) -> None:
        self._close_worlds()
        for made in self._alone_made.values():
            made.close()
        self._alone_made.clear()


def _epoch(made: ReleasingAllToAll) -> int:
    changes = made._communicator._changes
    return 0 if changes is None else changes.world.epoch


def _bare(store: Store) -> Store:
    """Without prefixes: ranks that come later may have another one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address(store: Store | None) -> str:
    """HOST:PORT; empty where the store has none."""
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""
