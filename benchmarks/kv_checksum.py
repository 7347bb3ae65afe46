"""What the checksum of a layer costs: GB/s of one thread here, and of the GPU if there is one.

python benchmarks/kv_checksum.py [--row-bytes 4096]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from moe_p2p.engine.checksum import rows_checksum

NBYTES = 32 << 20


def gbytes_per_s(device: str, row_bytes: int) -> float:
    memory = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=device)
    units = torch.randperm(NBYTES // row_bytes)
    best = float("inf")
    clock = time.thread_time if device == "cpu" else time.perf_counter  # others take the CPU
    for _ in range(5):
        began = clock()
        rows_checksum(
            memory,
            units,
            offset=0,
            unit=row_bytes,
            row_bytes=row_bytes,
            num_rows=1,
            row_stride=row_bytes,
        )
        best = min(best, clock() - began)
    return len(units) * row_bytes / best / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--row-bytes", type=int, default=4096)
    row_bytes = parser.parse_args().row_bytes
    torch.set_num_threads(1)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        rate, size = gbytes_per_s(device, row_bytes), row_bytes
        print(
            f"{device}: {rate:.2f} GB/s in rows of {size} bytes; at a sample of 0.01 a request "
            f"costs {1e9 * 0.01 / (rate * 1e9) * 1e3:.2f} ms a GB at each side"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
