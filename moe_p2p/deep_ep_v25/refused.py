"""What DeepEP 2.5 has beside EPBuffer and this package has not: it raises by name, with the reason.

docs/deep_ep.md has the same table.
"""

from __future__ import annotations

from typing import Any, NoReturn

REASONS = {
    "BucketBuffer": "all-gather, reduce-scatter and all-reduce of whole tensors are collectives of "
    "data parallelism, which NCCL has",
    "BucketSession": "it belongs to BucketBuffer: all-gather, reduce-scatter and all-reduce of "
    "whole tensors are collectives of data parallelism, which NCCL has",
    "EngramBuffer": "it fetches rows of tables from other ranks' memory by index, without experts; "
    "moe_p2p.Engine has read_pages",
    "PPBuffer": "tensors between neighbours of a pipeline are no part of dispatch and combine; "
    "moe_p2p.Engine has write, and NCCL send and recv",
}


def refusal(name: str, call: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"deep_ep_v25.{name}{call} is not served by moe_p2p, which has EPBuffer: {REASONS[name]}"
    )


class _Refused:
    """A class whose objects cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refusal(type(self).__name__)


class BucketBuffer(_Refused):
    """Not served: REASONS."""


class BucketSession(_Refused):
    """Not served: REASONS."""


class PPBuffer(_Refused):
    """Not served: REASONS."""


class EngramBuffer(_Refused):
    """Not served: REASONS. Its calls without an object raise likewise."""

    @staticmethod
    def get_storage_size_hint(*args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("EngramBuffer", ".get_storage_size_hint")

    @staticmethod
    def get_theoretical_config(*args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("EngramBuffer", ".get_theoretical_config")
