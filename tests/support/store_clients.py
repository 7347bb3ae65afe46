"""How many clients a TCPStore has: its server looks up a name for each, one after the other, and
answers nobody meanwhile."""

from __future__ import annotations

from pathlib import Path

_ESTABLISHED = "01"


def clients_of(port: int) -> int:
    """Connections of this host to that port."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(
        int(remote.rpartition(":")[2], 16) == port and state == _ESTABLISHED
        for _, _, remote, state, *_ in lines
    )
