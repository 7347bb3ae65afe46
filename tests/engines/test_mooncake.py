"""The real Mooncake wheel over its tcp beside moe_p2p.mooncake; SGLang's and checkpoint-engine's
classes over both."""

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
        timeout=250,
    )
    results = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))


def real() -> Path:
    return packages.where(MOONCAKE)


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
    paths = Path(f"{packages.where('sglang')}{os.pathsep}{packages.dependencies()}")
    assert run_with(paths, "-c", SGLANG) == [0, 0, 0, 0, 119, -1, 0, 0]


STORE = """
import json, logging, os, sys, types
import torch

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(names)

os.environ["RANK"] = "0"
module("loguru", logger=logging.getLogger("store"))
module("checkpoint_engine", __path__=[os.path.join(sys.argv[1], "checkpoint_engine")])
module("checkpoint_engine.device_utils", DeviceManager=object, get_ip=lambda: "127.0.0.1")
from checkpoint_engine.p2p_store import P2PStore

class Devices:
    transfer_engine_protocol = "tcp"
    device_module = types.SimpleNamespace(device_count=lambda: 8)
    rdma_device = staticmethod(lambda number: "")

source, reader = P2PStore(Devices()), P2PStore(Devices())
weights, target = torch.arange(4096, dtype=torch.float32), torch.zeros(4096)
reader.register_named_tensors({"target": target})
got = []
for update in range(3):
    weights += 1
    source.register_named_tensors({"weights": weights})
    target.zero_()
    places = [target.data_ptr()], [weights.data_ptr()], [target.nbytes]
    reader.batch_transfer_sync_read(source.addr, *places)
    got.append(bool(torch.equal(target, weights)))
    source.unregister_named_tensors(["weights"])
print("RESULT " + json.dumps(got), flush=True)
os._exit(0)
"""


@pytest.mark.engine("checkpoint-engine")
@pytest.mark.parametrize("wheel", [False, True], ids=["ours", "wheel"])
def test_checkpoint_engines_store_reads_three_updates(wheel: bool) -> None:
    """Its tensors are registered anew for each, at the same addresses."""
    path = real() if wheel else mooncake.installation.PATH
    folder = packages.find("checkpoint-engine")
    assert run_with(path, "-c", STORE, str(folder)) == [True] * 3
