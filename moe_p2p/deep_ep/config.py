"""DeepEP's Config: how many SMs a call may use, and hints of how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from moe_p2p import errors
from moe_p2p.deep_ep.runtime import NODE_RANKS

_ALIGNMENT_BYTES = 128
# In addition to its values a token may carry 128 expert ids (i64), 128 weights and 128 scales.
_TOKEN_EXTRA_BYTES = 128 * (8 + 4 + 4) + 16


def check_alignment(expert_alignment: int) -> None:
    """The op divides by it."""
    text = f"expert_alignment is {expert_alignment!r}, must be an int of at least 1"
    errors.require(isinstance(expert_alignment, int) and expert_alignment > 0, text)


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Where ranks differ in a field of AllToAllConfig, the error has the caller's name of it."""
    try:
        yield
    except errors.InvalidArgumentError as error:
        text = str(error)
        for field, name in names.items():
            text = text.replace(
                f"] {field} differs between ranks", f"] {name} differs between ranks"
            )
        raise type(error)(text) from None


@dataclass(frozen=True)
class Config:
    """num_sms: thread blocks that a call may use. Chunk sizes only enter the size hints."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_nvl_bytes, about what DeepEP takes. Buffer documents their use."""
        return self._size(
            hidden_bytes, min(num_ranks, NODE_RANKS), self.num_max_nvl_chunked_recv_tokens
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_rdma_bytes; 0 up to 8 ranks."""
        if num_ranks <= NODE_RANKS:
            return 0
        # One buffer to send from, one to receive into.
        tokens = 2 * self.num_max_rdma_chunked_recv_tokens
        return self._size(hidden_bytes, num_ranks // NODE_RANKS, tokens)

    def _size(self, hidden_bytes: int, num_peers: int, num_tokens: int) -> int:
        """Two SMs form a channel; each channel holds num_tokens of each peer."""
        rows = self.num_sms // 2 * num_peers * num_tokens
        return -(-rows * (hidden_bytes + _TOKEN_EXTRA_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Chunks(NamedTuple):
    """Sizes that DeepEP recommends for a number of ranks."""

    dispatch_send: int
    combine_send: int
    nvl_recv: int
    dispatch_rdma_send: int
    combine_rdma_send: int


_RECOMMENDED = {
    2: _Chunks(24, 10, 256, 6, 6),
    4: _Chunks(6, 9, 256, 6, 6),
    8: _Chunks(6, 4, 256, 6, 6),
    16: _Chunks(36, 4, 288, 20, 12),
    24: _Chunks(32, 1, 288, 8, 8),
    32: _Chunks(32, 1, 288, 8, 8),
    48: _Chunks(32, 1, 288, 8, 8),
    64: _Chunks(32, 1, 288, 8, 8),
    96: _Chunks(20, 1, 480, 12, 8),
    128: _Chunks(20, 1, 560, 12, 8),
    144: _Chunks(32, 2, 720, 12, 8),
    160: _Chunks(28, 2, 720, 12, 8),
}
_RDMA_RECV = 128


def recommend(num_ranks: int, num_sms: int, *, combine: bool) -> Config:
    """Returns the Config for a number of ranks; DeepEP's for the next larger one if it has none."""
    known = min((n for n in _RECOMMENDED if n >= num_ranks), default=max(_RECOMMENDED))
    chunks = _RECOMMENDED[known]
    if combine:
        send, rdma_send = chunks.combine_send, chunks.combine_rdma_send
    else:
        send, rdma_send = chunks.dispatch_send, chunks.dispatch_rdma_send
    return Config(num_sms, send, chunks.nvl_recv, rdma_send, _RDMA_RECV)
