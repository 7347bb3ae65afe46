"""TransferEngine with Mooncake's names, arguments and return codes. Serves `mooncake.engine`.

Calls do not raise: they log the error and return a negative number, because Mooncake's users look
at numbers. The wheel that was followed: mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moe_p2p import errors
from moe_p2p.mooncake import codes, handshake
from moe_p2p.mooncake.codes import TransferNotify, TransferOpcode, instead_of_errors
from moe_p2p.mooncake.endpoint import Endpoint
from moe_p2p.mooncake.transfer import Transfer

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]

SUPPORT_CUDA = torch.version.cuda is not None
SUPPORT_EFA = True
Read, Write = TransferOpcode.Read, TransferOpcode.Write


class TransferEngine(Endpoint):
    """One-sided transfers between registered memory of processes, by address.

    A peer is named "host:port", port being its get_rpc_port(). Any thread may call.
    """

    TransferOpcode = codes.TransferOpcode

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)

    # --- transfers that are waited for: 0, or a negative number ---

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns when the bytes are visible at the peer."""
        return self.transfer_sync(target_hostname, buffer, peer_buffer_address, length, Write)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns when the bytes are here."""
        return self.transfer_sync(target_hostname, buffer, peer_buffer_address, length, Read)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: codes.TransferOpcode,
        notify: codes.TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """notify: what the peer finds in get_notifies() when the bytes are there."""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes lengths[i] bytes at buffers[i] to peer_buffer_addresses[i], for all i."""
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, Write
        )

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads lengths[i] bytes at peer_buffer_addresses[i] into buffers[i], for all i."""
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, Read
        )

    @instead_of_errors(codes.FAILED)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
        notify: codes.TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Any number of pieces; runs that follow each other on both sides travel as one."""
        pieces = list(zip(buffers, peer_buffer_addresses, lengths, strict=True))
        self._begin(target_hostname, pieces, opcode).wait()
        if notify is not None:
            handshake.ask(target_hostname, {"notify": [notify.name, notify.msg]})
        return 0

    # --- transfers that are asked about later: a number, or 0 ---

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns a number for transfer_check_status; 0 on failure."""
        return self.batch_transfer_async(
            target_hostname, [buffer], [peer_buffer_address], [length], Write
        )

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        return self.batch_transfer_async(
            target_hostname, buffers, peer_buffer_addresses, lengths, Write
        )

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        return self.batch_transfer_async(
            target_hostname, buffers, peer_buffer_addresses, lengths, Read
        )

    @instead_of_errors(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        pieces = list(zip(buffers, peer_buffer_addresses, lengths, strict=True))
        begun = self._begin(target_hostname, pieces, opcode)
        number = next(self._numbers)
        self._batches[number] = begun
        return number

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all of them. 0; -1 when one failed or is not known. Each is asked for once."""
        codes = [self._wait_batch(number) for number in batch_ids]
        return min(codes, default=0)

    @instead_of_errors(codes.FAILED)
    def transfer_check_status(self, batch_id: int) -> int:
        """0: under way, 1: done, negative: failed. Asked again until it is not 0."""
        transfer = self._batches.get(batch_id)
        if transfer is not None and not transfer.done():
            return codes.PENDING
        return codes.COMPLETED if self._wait_batch(batch_id) == 0 else codes.FAILED

    @instead_of_errors(codes.FAILED)
    def _wait_batch(self, number: int) -> int:
        transfer = self._batches.pop(number, None)
        errors.require(transfer is not None, f"{number} is no transfer, or was asked for before")
        if transfer is not None:
            transfer.wait()
        return 0
