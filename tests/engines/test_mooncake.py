"""The real Mooncake wheel over its tcp, and SGLang's wrapper of it, against moe_p2p.mooncake."""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import mooncake
from tests.engines import packages
from tests.support import warm

MOONCAKE = "mooncake-transfer-engine-non-cuda"
ROOT = Path(__file__).resolve().parents[2]
SIGNATURES = """
import json, mooncake.engine as m
docs = {n: getattr(m.TransferEngine, n).__doc__ for n in dir(m.TransferEngine) if n[0] != "_"}
print("RESULT " + json.dumps({"docs": docs, "names": [n for n in dir(m) if n[0] != "_"]}))
"""
# Its RPC for Python objects and parts of its CUDA builds: no transfers of memory.
LACKING = {
    "CoroRPCInterface",
    "InnerTransferEngine",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "SharedSegment",
    "create_rpc_client",
    "create_rpc_server",
}


def run_with(path: Path, *arguments: str) -> Any:
    ran = warm.run(
        *arguments,
        env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "GLOG_minloglevel": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    results = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))


def real() -> Path:
    folder = packages.find(MOONCAKE)
    assert folder is not None
    return folder


@pytest.mark.engine(MOONCAKE)
def test_calls_return_what_the_wheel_returns() -> None:
    program = str(ROOT / "tests" / "support" / "mooncake_calls.py")
    ours, theirs = (run_with(p, program) for p in (mooncake.installation.PATH, real()))
    assert ours == theirs


@pytest.mark.engine(MOONCAKE)
def test_every_call_takes_the_wheels_parameters_in_their_order() -> None:
    found = run_with(real(), "-c", SIGNATURES)
    assert set(found["names"]) - set(dir(mooncake.engine)) == LACKING
    for name, text in found["docs"].items():
        if text is None or "self" not in text:
            continue  # no method
        method = getattr(mooncake.TransferEngine, name)
        ours = list(inspect.signature(method).parameters.values())[1:]
        theirs = re.findall(r", (\w+): ", text)
        assert len(ours) == len(theirs), name
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.name == wanted or wanted.startswith("arg"), f"{name}: {mine.name}"


SGLANG = """
import ctypes, json, sys
from moe_p2p import mooncake
mooncake.install()
from tests.engines import absent
absent.stand_in(absent.SGLANG)
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
a, b = (MooncakeTransferEngine("127.0.0.1", gpu_id=0) for _ in range(2))
source, target = (ctypes.c_ubyte * 4096)(*([7] * 4096)), (ctypes.c_ubyte * 4096)()
here, there = ctypes.addressof(source), ctypes.addressof(target)
got = [a.batch_register([here], [4096]), b.batch_register([there], [4096])]
got.append(a.transfer_sync(b.get_session_id(), here, there, 100))
places = [there + 200, there + 400]
got.append(a.batch_transfer_sync(b.get_session_id(), [here, here], places, [9, 10]))
got.append(sum(target) // 7)
got.append(a.transfer_sync("127.0.0.1:1", here, there, 100))
got.append(a.send_probe(b.get_session_id()))
a.deregister(here)
got.append(b.batch_deregister([there]))
print("RESULT " + json.dumps(got), flush=True)
"""


@pytest.mark.engine("sglang")
def test_sglangs_own_engine_works() -> None:
    folder = packages.find("sglang")
    assert folder is not None
    paths = Path(f"{folder}{os.pathsep}{packages.dependencies()}")
    assert run_with(paths, "-c", SGLANG) == [0, 0, 0, 0, 119, -1, 0, 0]
