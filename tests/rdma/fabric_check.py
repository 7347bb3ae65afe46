"""`python -m moe_p2p fabric-check --quick` between two RDMA devices: run in the machine of vm.py.

    python tests/rdma/fabric_check.py [options of fabric-check]

Two ranks, each a host of one rank, at the ends of the wire between rxe0 and rxe1. Then the bundle
is read back, as whoever gets it reads it. Interpreters are copies of one that has imported torch,
which takes half a minute in there; deadlines have the machine's slowness in them (--minutes).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import warm  # noqa: E402

QUICK = ("--quick", "--minutes=20", "--device=cpu")
SMALL = ("--hidden=256", "--topk=2", "--experts=8", "--tokens=4")
DEADLINE_S = 1300.0  # more than --minutes and the meeting


def start(rank: int, port: int, out: Path, options: list[str]) -> subprocess.Popen[str]:
    """A rank as srun would start it, on a host of its own."""
    given = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "MOE_P2P_TRANSPORT": "verbs",
        "MOE_P2P_TRANSPORT_SETTINGS": f"timeout=16,devices=rxe{rank}",
    }
    environment = os.environ | {name: str(value) for name, value in given.items()}
    command = ("-m", "moe_p2p", "fabric-check", *QUICK, *SMALL, f"--out={out}", *options)
    return warm.popen(*command, env=environment, cwd=ROOT, text=True)


def check(body: dict[str, Any], report: str) -> None:
    """Raises AssertionError unless everything was measured, over these NICs, and is right."""
    steps = {step["kind"]: step for step in body["steps"] if step["how"] != "left out"}
    assert all(step["how"] == "done" for step in steps.values()), body["steps"]
    assert body["wrong"] == []
    assert (body["hosts"], body["ranks"]) == (2, 2)
    for kind, step in steps.items():
        print(f"fabric-check, {kind}: {step['seconds']} s")
    rails = [(row["rank"], row["way"], *row["nics"]) for row in body["rails"]]
    wanted = [(rank, way, f"rxe{rank}") for rank in (0, 1) for way in ("alone", "together")]
    assert rails == (wanted if "rails" in steps else [])
    assert all(row["provider"] == "verbs" and row["problem"] == "" for row in body["rails"])
    assert all(min(row["gbytes_per_s"].values()) > 0 for row in body["rails"])
    assert all(row["correct"] for row in body["pairs"])
    systems = {(row["system"], row["nics"]) for row in body["pairs"]}
    assert systems == ({("moe_p2p", 1), ("torch", 0)} if "pairs" in steps else set())
    assert "<svg" in report


def main(options: list[str]) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [start(rank, port, out, options) for rank in (0, 1)]
        try:
            statuses = [rank.wait(DEADLINE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert statuses == [0, 0], statuses
        with tarfile.open(out / "bundle.tar.gz") as archive:
            file = archive.extractfile("bundle.json")
            assert file is not None
            body = json.load(file)
        check(body, (out / "report.html").read_text())
        tables = ("benchmarks/fabric_bundles.py", str(out / "bundle.tar.gz"))
        warm.run(*tables, cwd=ROOT, check=True)
    print(f"fabric-check over verbs: read back, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
