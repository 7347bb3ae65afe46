"""What the emulated GPU sees: it reports each fault that tests/emulation/planted.cu plants.

That kernels pass on it (test_emulated_gpu.py) means something only if these tests pass.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import emulated_gpu

PLANTED = emulated_gpu.ROOT / "tests" / "emulation" / "planted.cu"
# Each in a copy of this process, which it ends. Prints a line for each: name, report, status, text.
RUN = """
import ctypes, json, os, resource, signal, sys, tempfile
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
planted = ctypes.CDLL(sys.argv[2])
planted.moe_p2p_planted.restype = planted.moe_p2p_report.restype = ctypes.c_char_p
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in range(planted.moe_p2p_num_planted()):
    with tempfile.TemporaryFile() as printed:
        if not (child := os.fork()):
            signal.alarm(60)
            os.dup2(printed.fileno(), 2)
            planted.moe_p2p_run_planted(number)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    name, report = planted.moe_p2p_planted(number), planted.moe_p2p_report(number)
    print(json.dumps([name.decode(), report.decode(), status, text]))
"""


needs_an_emulated_gpu = pytest.mark.skipif(
    bool(emulated_gpu.why_not()), reason=emulated_gpu.why_not() or "it can run"
)


@needs_an_emulated_gpu
def test_each_planted_fault_is_reported() -> None:
    libraries = emulated_gpu.machine_library(), emulated_gpu.kernel_library(PLANTED.read_text())
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, libraries)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    ran = [json.loads(line) for line in done.stdout.splitlines()]
    unseen = {
        name: (status, text)
        for name, report, status, text in ran
        if status == 0 or status == -signal.SIGALRM or report not in text
    }
    assert not unseen, unseen
    assert len(ran) == PLANTED.read_text().count("    FAULT(")


@needs_an_emulated_gpu
def test_a_library_is_built_anew_when_anything_that_it_includes_changes() -> None:
    kernels = sorted(path.name for path in (emulated_gpu.ROOT / "kernels").glob("*.cu"))
    names = [*(f"kernels/{name}" for name in kernels), "tests/emulation/ahead.h"]
    names += [f"tests/emulation/{part}.cpp" for part in emulated_gpu.MACHINE]
    text = "".join(f'#include "{name}"\n' for name in names)
    folders = [f"-I{folder}" for folder in emulated_gpu.INCLUDED]
    command = [*emulated_gpu._compiler(), *emulated_gpu.FLAGS, "-MM", "-x", "c++", *folders, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    included = [Path(name) for name in done.stdout.replace("\\\n", " ").split()[1:] if name != "-"]
    assert len(included) > len(names)
    known = set(emulated_gpu._included(text).values())
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in included} <= known
