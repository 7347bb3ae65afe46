"""vLLM's all2all managers over AllToAll; vllm.py installs them.

A manager returns a Handle, not an AllToAll, because vLLM asks for it before top-k is known. With
`--enable-fault-tolerance` the manager of deepep_low_latency masks lost ranks.

Symbols: W ranks, T tokens, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.integrations import derived, required
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.pool import TIMEOUT_S, AllToAllPool, config_of
from moe_p2p.moe.row_counts import SizeExchange, capturing

_MANAGERS = "vllm.distributed.device_communicators.base_device_communicator"


class Masks:
    """Ranks that the communicators of a manager have lost, on the device of the first call."""

    def __init__(self, world_size: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.inference_mode(False):  # calls in any mode write to it
            self._masked = torch.zeros(world_size, dtype=torch.int32, device=device)
        self._in_use = False
        self.captured = False  # a CUDA graph holds calls that mask

    def called(self, *, capturing: bool) -> None:
        """By a call that masks."""
        self.captured |= capturing

    def masked(self, device: torch.device | None = None) -> Tensor:
        """Returns int32 [W]; 1: the rank is masked, 0: it lives (vLLM's polarity too)."""
        if device is not None and not self._in_use:
            with torch.inference_mode(False):
                self._masked = self._masked.to(device)
            self._in_use = True
        return self._masked


class Handle:
    """The AllToAll objects of one group, made when a layer's shape is first seen.

    max_tokens: most tokens of any rank in a call.
    check: raises the error that broke this or another handle of the manager. None: only this one.
    masks: whether lost ranks are masked; `masked` then says which. None: they are errors.
    num_sms: most thread blocks of a call; may change, and applies to communicators made later.
    """

    def __init__(
        self,
        group: Any,
        max_tokens: int,
        *,
        check: Callable[[], None] | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.num_sms: int | None = None
        self.sizes = SizeExchange()
        self._check = check or self.check
        self._masks = masks
        self._pool = AllToAllPool(group)

    def all_to_all(
        self, x: Tensor, topk_idx: Tensor, num_experts: int, *, one_step: bool
    ) -> AllToAll:
        """Returns the AllToAll for x [T, H] and topk_idx [T, K].

        one_step: calls must not be cut into steps, because halves are used.
        """
        self._check()
        config = config_of(
            num_experts=num_experts,
            hidden_dim=x.shape[1],
            topk=topk_idx.shape[1],
            max_tokens=self.max_tokens,
            dtype=x.dtype,
            device=x.device.type,
            chunk_tokens=self.max_tokens if one_step else None,
            num_sms=self.num_sms,
            timeout_s=TIMEOUT_S,
            mask_lost_ranks=self._masks is not None,
        )
        if self._masks is None:
            return self._pool.get(config)
        self._masks.called(capturing=capturing(x))
        return self._pool.get(config, masked=self._masks.masked(x.device))

    def limit_sms(self, num_sms: int | None) -> None:
        self.num_sms = num_sms

    @property
    def keeps_masking(self) -> bool:
        """Whether clean_masks() keeps the communicators."""
        return self._pool.keeps_masking

    def clean_masks(self) -> None:
        """Takes masked ranks back (AllToAllPool.clean_masks)."""
        self._pool.clean_masks()

    def check(self) -> None:
        """Raises the error that broke any of its AllToAlls (AllToAll.check)."""
        self._pool.check()

    def destroy(self) -> None:
        self._pool.close()


class All2AllManager:
    """One per group of expert-parallel ranks; vLLM passes the group's CPU process group."""

    cpu_group: Any  # set by the base class
    _masks: Masks | None = None  # LowLatencyManager may have some

    def __init__(
        self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None
    ) -> None:
        super().__init__(cpu_group, tcp_store_group)  # type: ignore[call-arg]  # base of vLLM
        self._handles: dict[int, Handle] = {}
        self._num_sms: int | None = None

    def get_handle(self, kwargs: dict[str, Any]) -> Handle:
        """kwargs: as for the replaced backend; only the number of tokens is used."""
        max_tokens = (
            kwargs.get("max_num_tokens_per_dp_rank")
            or kwargs.get("num_max_tokens_per_rank")
            or _vllm_config().scheduler_config.max_num_batched_tokens
        )
        if max_tokens not in self._handles:
            made = Handle(self.cpu_group, max_tokens, check=self.check, masks=self._masks)
            made.limit_sms(self._num_sms)
            self._handles[max_tokens] = made
        return self._handles[max_tokens]

    def set_num_sms(self, num_sms: int) -> None:
        """Limits the thread blocks of calls; a later, larger number changes nothing.

        Around overlapping micro-batches vLLM reserves a few and then gives all back. A communicator
        is made for one number, so the least one stays.
        """
        self._num_sms = min(num_sms, self._num_sms or num_sms)
        for handle in self._handles.values():
            handle.limit_sms(self._num_sms)

    def max_sms_used(self) -> int | None:
        """Returns the limit of set_num_sms; None: no limit."""
        return self._num_sms

    def check(self) -> None:
        """Raises the error that broke any of its handles.

        prepare() calls it. Replays of CUDA graphs do not: call this once per step of them.
        """
        for handle in self._handles.values():
            handle.check()

    def destroy(self) -> None:
        while self._handles:
            self._handles.popitem()[1].destroy()


class LowLatencyManager(All2AllManager):
    """Of deepep_low_latency. With fault tolerance, calls go on without ranks that are lost."""

    world_size: int  # set by the base class

    def __init__(self, *groups: Any, **more: Any) -> None:
        super().__init__(*groups, **more)
        config = _vllm_config().parallel_config
        self.support_fault_tolerance = bool(getattr(config, "enable_fault_tolerance", False))
        self._masks = Masks(self.world_size) if self.support_fault_tolerance else None

    def max_sms_used(self) -> int | None:
        """Returns 0: as for the replaced backend, none is kept free of experts for its calls."""
        return 0

    def query_active_mask(self) -> Tensor:
        """Returns int32 [W] on the device: 0: the rank lives, 1: it is masked."""
        return self._required_masks().masked()

    def query_fault(self) -> Tensor:
        """Returns a bool tensor on the device, without waiting: whether a rank is masked."""
        return self.query_active_mask().any()

    def clean_buffers(self) -> None:
        """Takes masked ranks back; every rank calls it by itself, and then all go on together.

        Also a rank without masks of its own, because others may have masked it. On one host the
        communicators stay, and CUDA graphs with them; on several the next call of each shape makes
        a new communicator of the ranks that make it in time.

        Raises UnavailableError on several hosts when ranks are masked and a CUDA graph holds the
        communicators: no replay could take a masked rank back.
        """
        masks = self._required_masks()
        masked = masks.masked()
        keeps = all(handle.keeps_masking for handle in self._handles.values())
        if masks.captured and not keeps:
            lost = masked.nonzero().flatten().tolist()
            if lost:
                text = (
                    f"ranks {lost} are masked, and CUDA graphs hold the communicators that lost "
                    "them: restart the workers, or start vLLM with --enforce-eager to take ranks "
                    "back"
                )
                raise errors.make(errors.UnavailableError, text)
            return  # graphs go on as they are; a rank that has masked this one raises there
        for handle in self._handles.values():
            handle.clean_masks()
        masked.zero_()

    def _required_masks(self) -> Masks:
        errors.require(
            self._masks is not None,
            "lost ranks are errors here: start vLLM with --enable-fault-tolerance to mask them",
        )
        assert self._masks is not None
        return self._masks


@functools.cache
def manager_classes() -> tuple[Any, Any]:
    """Returns (LowLatencyManager, All2AllManager) as vLLM classes, or raises ImportError."""
    base = required(_MANAGERS, "vllm").All2AllManagerBase
    return derived(LowLatencyManager, base), derived(All2AllManager, base)


def _vllm_config() -> Any:
    return required("vllm.config", "vllm").get_current_vllm_config()
