"""DeepEP's calls as its documentation shows them: a dispatch and its combine, to be repeated.

Imports torch alone: workers of benchmarks/turns.py make the calls of another tree with it.

Shapes: T tokens, K top-k, H hidden size, R rows at this rank's experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

SYNC: dict[str, Any] = {"async_finish": False, "return_recv_hook": False}


class Exchange:
    """One interface of a buffer, on inputs that stay where they are.

    x: [T, H], or values and scales. state: what the last dispatch returned; rows first.
    """

    def __init__(self, buffer: Any, x: Any, idx: Tensor, weights: Any, experts: int) -> None:
        self.buffer, self.x, self.idx, self.weights = buffer, x, idx, weights
        self.experts = experts
        self.state: Any = ()
        self.out: Any = None

    def dispatch(self) -> object:
        raise NotImplementedError

    def combine(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def rows(self) -> Tensor:
        """[R, H], without scales."""
        rows: Tensor = self.state[0][0] if isinstance(self.state[0], tuple) else self.state[0]
        return rows


class LowLatency(Exchange):
    """Rows per (token, expert), padded; quantizes inside, weights at the source."""

    def __init__(
        self, *given: Any, fp8: bool = True, logfmt: bool = False, out: Tensor | None = None
    ) -> None:
        super().__init__(*given)
        self.out, self._into, self._fp8 = out, out, fp8
        self._how = SYNC | ({"use_logfmt": True} if logfmt else {})

    def dispatch(self) -> object:
        self.state = self.buffer.low_latency_dispatch(
            self.x, self.idx, len(self.idx), self.experts, use_fp8=self._fp8, **SYNC
        )
        return self.state

    def combine(self, y: Tensor) -> Tensor:
        found = self.buffer.low_latency_combine(
            y, self.idx, self.weights, self.state[2], out=self._into, **self._how
        )
        out: Tensor = found[0] if self._into is None else self._into
        self.out = out
        return out


class Normal(Exchange):
    """Rows per (token, rank); sums without weights. cached: by the handle of the first dispatch.

    more: of dispatch. Without num_worst_tokens among it the host waits for the counts.
    """

    def __init__(self, *given: Any, cached: bool = False, **more: Any) -> None:
        super().__init__(*given)
        self._cached, self._more = cached, more

    def dispatch(self) -> object:
        if self._cached and self.state:
            self.state = (self.buffer.dispatch(self.x, handle=self.state[4])[0], *self.state[1:])
            return self.state
        return self.fresh()

    def fresh(self) -> object:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.idx, self.experts
        )
        self.state = self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.idx,
            topk_weights=self.weights,
            **self._more,
        )
        return self.state

    def combine(self, y: Tensor) -> Tensor:
        out: Tensor = self.buffer.combine(y, self.state[4])[0]
        self.out = out
        return out


class V2(Exchange):
    """Rows per (token, rank), room for the worst case. sync: the host waits for the counts."""

    def __init__(self, *given: Any, num_sms: int, sync: bool = False) -> None:
        super().__init__(*given)
        self._num_sms, self._sync = num_sms, sync

    def dispatch(self) -> object:
        self.state = self.buffer.dispatch(
            self.x,
            topk_idx=self.idx,
            topk_weights=self.weights,
            num_experts=self.experts,
            num_max_tokens_per_rank=len(self.idx),
            num_sms=self._num_sms,
            do_cpu_sync=self._sync,
        )
        return self.state

    def combine(self, y: Tensor) -> Tensor:
        out: Tensor = self.buffer.combine(y, handle=self.state[3], num_sms=self._num_sms)[0]
        self.out = out
        return out

    @property
    def received(self) -> int:
        """Rows that have come; those behind hold anything."""
        return int(self.state[3].psum_num_recv_tokens_per_scaleup_rank[-1])
