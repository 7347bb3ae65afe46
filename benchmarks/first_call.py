"""Seconds of the first call of a new shape: kernels compiled, loaded, a pair of calls done.

    python benchmarks/first_call.py --json out.json     # needs a GPU; about 20 s

Each process is rank 0 of a mirror world of 8 (docs/gpu.md) and its own partner, so processes do not
wait for each other, but share a folder of kernels as ranks of a host do. Into an empty folder by
one process, then by 8 at once, dealt to the GPUs, then from the filled folder. kernels: the part
until all are loaded. Start of Python and of CUDA is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from mirror_worker import Case, make_all_to_all  # noqa: E402

LIMIT_S = 60.0
BARS_S = {"one_s": 3.0, "together_s": 5.0, "filled_kernels_s": 0.1}


def child(case: Case) -> None:
    """Prints seconds of communicator, kernels and first pair, and of loading kernels alone."""
    from moe_p2p.machine import jit

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    began = time.monotonic()
    made = make_all_to_all(case, (0, 1, secrets.token_hex(8)), "cuda")
    torch.cuda.synchronize()
    took = time.monotonic() - began
    print(json.dumps([took, max((each.ready_s for each in jit.report()), default=0.0)]), flush=True)
    del made
    os._exit(0)


def start(folder: Path, place: int, given: argparse.Namespace) -> tuple[float, float]:
    command = [sys.executable, __file__, "--child", "--tokens", str(given.tokens)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(place % max(torch.cuda.device_count(), 1)),
        "MOE_P2P_CACHE": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"first_call: a process failed:\n{done.stderr[-2000:]}")
    seconds, kernels = json.loads(done.stdout.splitlines()[-1])
    return seconds, kernels


def main(arguments: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=128, help="T of DeepSeek-V3's shape (128)")
    add("--processes", type=int, default=8, help="at once (8)")
    add("--json", help="file (none)")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU; see python -m moe_p2p doctor")
    if given.child:
        child(Case(name="first", tokens=given.tokens))
    with tempfile.TemporaryDirectory(prefix="moe_p2p.first.") as folder:
        one, together = Path(folder) / "one", Path(folder) / "together"
        alone = start(one, 0, given)
        with ThreadPoolExecutor(given.processes) as threads:
            places = range(given.processes)
            several = list(threads.map(lambda place: start(together, place, given), places))
        again = start(one, 0, given)
    found = {
        "one_s": alone[0],
        "together_s": max(each[0] for each in several),
        "filled_s": again[0],
        "filled_kernels_s": again[1],
    }
    for name, seconds in found.items():
        wanted = f"  wanted: {BARS_S[name]:g}" if name in BARS_S else ""
        print(f"{name:18}{seconds:8.2f} s{wanted}")
    if given.json:
        Path(given.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
