"""The scheduler's half of MoeP2pConnector: which requests are sent or awaited, and what workers
have to know of them in each step. No transfer happens here.

Requests carry NIXL's parameters. A prefiller's are do_remote_decode; its answer, which routers pass
on to a decoder, has do_remote_prefill, remote_engine_id, remote_request_id and so on. A router that
sends to both at once gives both the same `transfer_id`, and the decoder remote_engine_id too: then
layers travel while later ones are computed. Prefill that was preempted begins anew under another
attempt of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moe_p2p import log
from moe_p2p.integrations.kv.worker import split_address


@dataclass
class SendStep:
    """A request of which this step computes tokens up to `end`, of `total`. blocks: of each group,
    all since its first token. first: of this attempt."""

    name: str
    blocks: tuple[list[int], ...]
    end: int
    total: int
    first: bool


@dataclass
class Load:
    """A request that waits for tokens `begin` to `total` from the instance `source`."""

    name: str
    source: str
    blocks: tuple[list[int], ...]
    begin: int
    total: int


@dataclass
class StepMeta:
    """What workers have to know of a step, by the request's id here. A name is the one that
    prefiller and decoder both use for a request."""

    sends: dict[str, SendStep] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    aborted: dict[str, str] = field(default_factory=dict)  # name, of those that are not sent on
    loads: dict[str, Load] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)  # instance, by name


@dataclass
class _Sending:
    """A request that this prefiller sends."""

    name: str
    total: int
    attempt: int = 0
    blocks: tuple[list[int], ...] = ()
    active: bool = False  # workers have pages of it
    done: bool = False  # all tokens were scheduled


_SAMPLE = re.compile(r"(\d+)_")  # vLLM's parallel_sampling.py, get_child_info


def attempt_name(name: str, attempt: int) -> str:
    return f"{name}#{attempt}"


class KVScheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine_id: str, store: str) -> None:
        self._config, self._caches = vllm_config, kv_cache_config
        self._transfer = vllm_config.kv_transfer_config
        self._engine_id, self._store = engine_id, store
        self._sending: dict[str, _Sending] = {}
        self._meta = StepMeta()  # of the next step
        self._ended: set[str] = set()  # requests whose blocks workers still read
        self._moving: set[str] = set()  # that workers send right now

    # --- decode ---

    def num_matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        why = ""
        if not self._transfer.is_kv_consumer:
            why = "this engine awaits no pages, its kv_role is kv_producer, not kv_both"
        elif not (_name_of(params, request) and params.get("remote_engine_id")):
            why = (
                "kv_transfer_params need remote_engine_id, and remote_request_id or transfer_id, "
                f"not {params}"
            )
        if why:
            log.warning(f"request {request.request_id}: {why}; its prompt is computed here")
            params["do_remote_prefill"] = False
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once a request, also where it is preempted
        name, source = _name_of(params, request), str(params["remote_engine_id"])
        if num_external_tokens <= 0:  # all of it is in the prefix cache
            self._meta.declined[name] = source
            return
        total = request.num_prompt_tokens
        self._meta.loads[request.request_id] = Load(
            name,
            source,
            self._caches.select_transfer_block_ids(blocks.get_block_ids()),
            total - num_external_tokens,
            total,
        )

    # --- prefill ---

    def added(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return
        if self._transfer.is_kv_producer:
            name = _name_of({"transfer_id": params.get("transfer_id")}, request)
            name = name or request.request_id
            self._sending[request.request_id] = _Sending(name, request.num_prompt_tokens)
            return
        log.warning(
            f"request {request.request_id}: this engine sends no pages, its kv_role is "
            "kv_consumer, not kv_both; it is computed here"
        )

    def _schedule_sends(self, output: Any) -> None:
        for request_id in output.preempted_req_ids or ():
            sending = self._sending.get(request_id)
            if sending is not None and sending.active:
                self._meta.preempted.add(request_id)
                sending.attempt += 1
                sending.blocks, sending.active, sending.done = (), False, False
        for new in output.scheduled_new_reqs:
            self._send(output, new.req_id, new.block_ids, new.num_computed_tokens, resumed=True)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            self._send(
                output,
                request_id,
                cached.new_block_ids[at],
                cached.num_computed_tokens[at],
                resumed=request_id in cached.resumed_req_ids,
            )

    def _send(
        self, output: Any, request_id: str, blocks: Any, computed: int, *, resumed: bool
    ) -> None:
        sending = self._sending.get(request_id)
        if sending is None or sending.done:
            return
        if blocks is not None:
            new = self._caches.select_transfer_block_ids(blocks)
            old = sending.blocks or tuple([] for _ in new)
            sending.blocks = tuple(
                list(b) if resumed else a + list(b) for a, b in zip(old, new, strict=True)
            )
        end = min(computed + output.num_scheduled_tokens[request_id], sending.total)
        self._meta.sends[request_id] = SendStep(
            attempt_name(sending.name, sending.attempt),
            sending.blocks,
            end,
            sending.total,
            first=not sending.active,
        )
        sending.active, sending.done = True, end == sending.total

    # --- both ---

    def step_meta(self, output: Any) -> StepMeta:
        self._schedule_sends(output)
        meta, self._meta = self._meta, StepMeta()
        return meta

    def has_news(self) -> bool:
        """Whether workers must get a step's news although no request may be running."""
        meta = self._meta
        return bool(meta.aborted or meta.declined or meta.preempted)

    def heard(self, moving: set[str] | None, sent: Iterable[str]) -> None:
        self._moving = self._moving if moving is None else moving
        self._ended.difference_update(sent)

    def about_to_free(self) -> set[str]:
        """Leaves out requests that no decoder has opened: vLLM would wait for open_s."""
        return self._ended & self._moving

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether workers report when blocks may be freed, and the router's parameters."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # rejected here before it was scheduled
            params["do_remote_prefill"] = False
            name, source = _name_of(params, request), params.get("remote_engine_id")
            if name and source and self._transfer.is_kv_consumer:
                self._meta.declined[name] = source
        sending = self._sending.pop(request.request_id, None)
        if sending is None:
            return False, None
        if sending.active:
            self._ended.add(request.request_id)
        if request.status.name not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            name = attempt_name(sending.name, sending.attempt)
            self._meta.aborted[request.request_id] = name
            return sending.active, None
        host, port = split_address(self._store)
        parallel = self._config.parallel_config
        return sending.active, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": self._caches.select_transfer_block_ids(block_ids),
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": request.num_computed_tokens,
            "transfer_mode": "push",
            "transfer_id": params.get("transfer_id") or request.request_id,
        }


def _name_of(params: dict[str, Any], request: Any) -> str:
    """With n=2, vLLM makes requests "0_ID" and "1_ID" of one, which have its parameters: each
    sample is a transfer of its own."""
    name = str(params.get("transfer_id") or params.get("remote_request_id") or "")
    sample = _SAMPLE.match(request.request_id)
    return f"{name}+{int(sample[1])}" if name and sample and int(sample[1]) else name
