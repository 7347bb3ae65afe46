#!/usr/bin/env python3
"""moe_p2p adapter for CollectiveX (SemiAnalysisAI/InferenceX, experimental/CollectiveX): AllToAll.

Copied to its bench/ folder; README.md beside this file says how. Both modes are one AllToAll:

  normal       layout "by_rank": one row for each token that has experts here, with their local ids
               and weights; sums of rows as they are.
  low-latency  layout "padded": [E_local, capacity, H], a row for each (token, expert); combine
               multiplies by the weights, and partial sums travel as block16, which rounds once.

fp8 is quantized inside the dispatch (float8_e4m3fn, a float32 scale for 128 values).
"""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from ep_backend import EPBackend

from moe_p2p import AllToAll, AllToAllConfig, CombineOptions, DispatchOptions
from moe_p2p.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

_LOW_LATENCY_CAP = 256  # tokens a rank, as the other adapters have it


class MoeP2pBackend(EPBackend):
    name = "moe-p2p"
    maturity = "candidate"
    kernel_generation = "moe-p2p-all-to-all"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    requires_fresh_pair = True  # a dispatch holds its step until its combine

    def __init__(self, args, rank, world_size, local_rank, device):
        super().__init__(args, rank, world_size, local_rank, device)
        self.experts_per_rank = args.experts // world_size
        self.padded = self.mode == "low-latency"
        if self.padded:
            self.receive_layout = "token-expert"
            self.combine_weight_semantics = "weighted-kernel-sum"
        self.fp8 = self.precision == "fp8"
        self.stage_device_work = self.fp8  # what was received becomes bfloat16 again
        if self.fp8:
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes = 1
            self.dispatch_scale_bytes_per_copy = (args.hidden + 127) // 128 * 4
        self.options = DispatchOptions(
            layout="padded" if self.padded else "by_rank", quantize=self.fp8, zero_padding=False
        )
        self.sums = CombineOptions(partials="block16" if self.padded else None)

    def buffer_cap(self, args):
        return _LOW_LATENCY_CAP if self.padded else None

    def create_buffer(self, spec):
        args = self.args
        self.all_to_all = AllToAll(
            dist.group.WORLD,
            AllToAllConfig(
                num_experts=args.experts,
                hidden_dim=args.hidden,
                topk=args.topk,
                max_tokens=spec.max_tokens_per_rank,
                dtype=torch.bfloat16,
                device=self.device.type,
            ),
        )
        self.all_to_all.prepare(self.options, combine=self.sums)

    def semantic_payload(self, x):
        return per_token_cast_back(*per_token_cast_to_fp8(x)) if self.fp8 else x

    # --- the calls that are timed ---

    def dispatch(self, p):
        received = self.all_to_all.dispatch(
            p.dispatch_x, p.topk_idx, p.topk_weights, options=self.options, max_tokens=p.T
        )
        return types.SimpleNamespace(received=received)

    def stage(self, p, h):
        h.combine_input = self._rows(h.received)

    def combine(self, p, h):
        return self.all_to_all.combine(h.combine_input, h.received, options=self.sums)

    # --- what the oracle reads ---

    def _rows(self, received):
        """Received rows as bfloat16, where they lie."""
        if not self.fp8:
            return received.x
        rows, scales = received.x.flatten(0, -2), received.scales.flatten(0, -2)
        return per_token_cast_back(rows, scales).view(received.x.shape)

    def recv_tokens(self, h):
        received = h.received
        return int(received.counts.sum() if self.padded else received.offsets[-1])

    def inspect_dispatch(self, p, h):
        received, first = h.received, self.rank * self.experts_per_rank
        counts = received.counts.to(torch.int64)
        rows = self._rows(received)
        if self.padded:
            places = torch.arange(rows.shape[1], device=rows.device)
            h.expert, h.place = (places < counts[:, None]).nonzero(as_tuple=True)
            return types.SimpleNamespace(
                payload=rows[h.expert, h.place],
                expert_ids=first + h.expert,
                local_expert_counts=counts,
            )
        num_rows = self.recv_tokens(h)
        local = received.row_topk[:num_rows].to(torch.int64)
        here = local >= 0
        return types.SimpleNamespace(
            payload=rows[:num_rows],
            expert_ids=torch.where(here, local + first, local),
            weights=received.row_weights[:num_rows].masked_fill(~here, 0),
            local_expert_counts=counts,
        )

    def combine_transformed(self, p, h, transformed):
        received = h.received
        rows = torch.zeros(received.x.shape, dtype=torch.bfloat16, device=received.x.device)
        if self.padded:
            rows[h.expert, h.place] = transformed.to(rows.dtype)
        else:
            rows[: transformed.shape[0]] = transformed.to(rows.dtype)
        return self.all_to_all.combine(rows, received, options=self.sums)

    def finalize(self, rc):
        try:
            dist.barrier()
            self.all_to_all.close()
            dist.barrier()
            dist.destroy_process_group()
        except Exception:
            return 1
        return rc
