"""BufferBase: what DeepEP 2.5's buffers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BufferBase(ABC):
    """runtime: None once the buffer is destroyed."""

    def __init__(self, explicitly_destroy: bool = False) -> None:
        self.explicitly_destroy = explicitly_destroy
        self.runtime: Any = None

    @property
    def main_context(self) -> None:
        """None: a communication context is DeepEP's wrapper of NCCL's."""
        return None

    @abstractmethod
    def print_memory_usage(self) -> None:
        """Prints how many bytes this rank's buffer takes."""

    @abstractmethod
    def destroy(self) -> None:
        """Waits for all ranks, then frees everything. Collective; needs explicitly_destroy=True."""
