"""Tests and figures of a machine with GPUs, one after the other, each with a limit of time.

    python benchmarks/gpu_figures.py                    # what the GPUs at hand allow
    python benchmarks/gpu_figures.py --list --gpus 8    # what would run with 8 of them
    python benchmarks/gpu_figures.py --only turns,weights --base ../before --total-s 540 --lines 0

Each step is a command of the project, in processes of its own; what it prints goes to OUT/NAME.log,
its figures to OUT/NAME.json, its last lines to the terminal, name, status and seconds of all to
OUT/summary.json. A step whose limit is over is ended with all of its processes. Last come failed
tests and a table of figures beside what is wanted (gpu_bars.py). Groups: correctness, turns of
kernels and calls, transfers (KV, weights, tune, layers), models (today's models on all GPUs and as
mirrored EP8, skewed routing), many (more than two GPUs), more. The first four take less than ten
minutes each on two GPUs. Exit status 1 where a step failed or was ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_bars  # noqa: E402

BENCH = "-m moe_p2p bench"
WORKERS = 12  # of tests: each has ranks as threads with few blocks, half of them on each GPU
PYTEST = "-m pytest -o cache_dir={out}/tests --progress -rf --tb=short --durations=12"
PRINTS_S = 25.0  # of a step of tests, at its end: no test begins any more, failures are printed
# First those of what is new: they find most, should time run out.
NEW_TESTS = (
    *(
        "row_kernel",
        "copy_kernel",
        "engine",
        "signals",
        "kv_rows",
        "pack",
        "timed_nic",
        "arrival_flags",
    ),
    *("tuned", "prepare", "int10", "count_kernel", "sum_order", "opaque_rows"),
    *("mirror", "clean_masks"),
)
ENGINE_TESTS = ("integrations", "vllm_experts")
MANY_TESTS = ("processes", "failures", "masks", "clean_masks", "training", "bench", "engine")
PRINTED_TESTS = ("driver",)  # what the driver does is of interest where they pass, too
MODELS = ("deepseek-v4-pro", "deepseek-v4-flash", "kimi-k3", "glm-5")
SKEWS = ("uniform", "maxvio:0.2", "maxvio:1", "maxvio:4", "zipf:1")
QUIET_TESTS = ("gpu_memory", "memory")  # they count what a GPU has left
SANITIZED = "--error-exitcode 9 --kernel-name kns=moe_p2p"
FAILED_LINES = 6
NO_TESTS = 5  # pytest's status
GROUPS = ("correctness", "turns", "transfers", "models", "many", "more")


class Step(NamedTuple):
    """command: arguments of python as a shell reads them; {out} is the folder of results,
    {seconds} what is left of its time.

    needs: a module, a program, or a tree. under: a program with arguments that runs python.
    """

    name: str
    command: str
    limit_s: float
    gpus: int = 2
    needs: str = ""
    group: str = "more"
    under: str = ""


def _files(names: Iterable[str]) -> str:
    return " ".join(f"tests/gpu/test_{name}.py" for name in names)


def _tests(name: str, limit_s: float, chosen: str, workers: int = 1) -> Step:
    many = f"-n {workers} --apart " if workers > 1 else ""
    command = f"{PYTEST} {many}--session-timeout={{seconds}} -m 'gpu or multi_gpu' {chosen}"
    return Step(name, command, limit_s, 1)


def steps(gpus: int, base: str = "", first: str = "") -> Iterator[Step]:
    """What `gpus` GPUs of one host allow. base, first: trees, "" for none."""
    for group, made in (
        ("correctness", _correctness()),
        ("turns", _turns(base, first)),
        ("transfers", _transfers()),
        ("models", _models()),
        ("many", _many(gpus) if gpus > 2 else ()),
        ("more", _more(gpus)),
    ):
        for step in made:
            yield step._replace(group=group)


def _correctness() -> Iterator[Step]:
    here = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    new, engines, printed = (
        [f"gpu_{name}" for name in names if f"gpu_{name}" in here]
        for names in (NEW_TESTS, ENGINE_TESTS, PRINTED_TESTS)
    )
    yield Step("machine", "-m moe_p2p doctor", 40, 1)
    if printed:
        yield _tests("tests-driver", 90, f"-s {_files(printed)}")
    yield _tests("tests-new", 180, _files(new), WORKERS)
    yield _tests("tests-engines", 110, _files(engines), 3)
    yield Step("kv-server", "-m moe_p2p.examples.disaggregated", 45)
    yield Step("rl", "-m moe_p2p.examples.rl", 45)
    yield _tests("tests-quiet", 60, _files(QUIET_TESTS))
    tool = "compute-sanitizer"
    yield Step("memcheck", "tests/sanitize_gpu.py", 50, 1, tool,
               under=f"{tool} --report-api-errors no {SANITIZED}")  # fmt: skip
    yield Step("racecheck", "tests/sanitize_gpu.py alone", 40, 1, tool,
               under=f"{tool} --tool racecheck {SANITIZED}")  # fmt: skip
    rest = sorted(here - {*new, *engines, *printed, *QUIET_TESTS, "emulated_gpu"})
    others = " tests/deep_ep tests/engine tests/moe tests/layer tests/weights tests/mooncake"
    yield _tests("tests-rest", 230, _files(rest) + others, WORKERS)
    # One after the other: what fails here too does not fail for want of a GPU's time.
    yield _tests("tests-again", 120, "--last-failed --last-failed-no-failures=none tests")


def _turns(base: str, first: str) -> Iterator[Step]:
    """base: the tree before this one. first: the one that host time counts from."""
    quoted = [shlex.quote(each) for each in (first, base) if each]
    trees = " ".join([*quoted[-1:], "."])
    yield Step("turns", f"benchmarks/turns.py mirror {trees} --rounds 6 --json {{out}}/turns.json",
               150, 1, needs=base)  # fmt: skip
    trees = " ".join([*quoted[:1], "."])
    host = f"benchmarks/turns.py host {trees} --json {{out}}"
    yield Step("host", f"{host}/host.json --only host --rounds 6", 120, needs=first or base)
    waiting = "normal_counted 512,normal_counted 4096,v2_counted 128,v2_counted 4096"
    yield Step("span", f"{host}/span.json --only span --rounds 4 --cases "
               + f"'{waiting}'", 160, needs=first or base)  # fmt: skip
    for system in ("shim", "shim_fused", "integration"):  # systems of one process share kernels
        yield Step(f"megatron-{system}", f"{BENCH} --api megatron --empty-cache --systems "
                   f"alltoall,{system} --json {{out}}/megatron-{system}.json", 90)  # fmt: skip
    yield Step("nodes-2x1", f"{BENCH} --transport timed --preset cx7 --ranks-per-node 1 --tokens "
               "8,128 --no-baseline --chunk-tokens T --json {out}/nodes-2x1.json", 90)  # fmt: skip
    yield Step("deep-ep-calls", f"{BENCH} --api deep_ep --tokens 128,4096 "
               "--json {out}/deep-ep-calls.json", 120)  # fmt: skip
    yield Step("first-call", "benchmarks/first_call.py --json {out}/first-call.json", 60, 1)


def _transfers() -> Iterator[Step]:
    pages = f"{BENCH} --api kv --repeats 3 --systems= --json {{out}}"
    yield Step("kv-4k", f"{pages}/kv-4k.json --tokens 4096 --page-kib 16,64", 70)
    yield Step("kv-16k", f"{pages}/kv-16k.json --tokens 16384 --page-kib 16,64", 110)
    yield Step("kv-post", f"{pages}/kv-post.json --tokens 64 --page-kib 4", 40)
    yield Step("kv-packing", "benchmarks/kv_pack.py --sms 6 12 24 --write-bytes 1048576 4194304 "
               "8388608", 80, 1)  # fmt: skip
    yield Step("kv-reclaim", "benchmarks/kv_reclaim.py --gpu --cancels 100 --failures 5", 70)
    loads = f"{BENCH} --api weights --json {{out}}"
    yield Step("weights", f"{loads}/weights.json --repeats 3", 110)
    yield Step("weights-in-place", f"{loads}/weights-in-place.json --mode in_place --repeats 3 "
               "--no-baseline --no-join", 60)  # fmt: skip
    yield Step("weights-decode", f"{loads}/weights-decode.json --decode --pairs 10000 --way-s 15 "
               "--transport timed --transport-settings preset=cx7", 80)  # fmt: skip
    yield Step("experts", f"{BENCH} --api experts --json {{out}}/experts.json", 60)
    yield _layer("deepseek-v3", 150)
    yield Step("pairs", f"{BENCH} --tokens 8,32,128,512,4096 --json {{out}}/pairs.json", 90)
    yield Step("tune", "-m moe_p2p tune --into {out}/tune.json --only launches,bulk --seconds 0.2 "
               "--tokens 8,128,512", 140, 1)  # fmt: skip


def _layer(model: str, seconds: int) -> Step:
    """All products of this machine side by side, with overlap too."""
    return Step(f"layer-{model}", f"{BENCH} --mirror 8 --layer {model} --tokens 8,128,4096 "
                f"--chunk-tokens T --overlap 8,24 --json {{out}}/layer-{model}.json",
                seconds, 1)  # fmt: skip


def _models() -> Iterator[Step]:
    """Skew is of ranks that differ: not in the mirror, where all do what rank 0 does."""
    for name in MODELS:
        pairs = f"{BENCH} --model {name} --tokens 8,32,128,4096 --chunk-tokens T --no-baseline"
        yield Step(f"models-{name}", f"{pairs} --json {{out}}/models-{name}.json", 60)
        mirror = pairs.replace(" --no-baseline", " --mirror 8")
        yield Step(f"models-mirror-{name}", f"{mirror} --json {{out}}/models-mirror-{name}.json",
                   60, 1)  # fmt: skip
    for routing in SKEWS:
        name = f"models-skew-{routing.replace(':', '-')}"
        yield Step(name, f"{BENCH} --model deepseek-v4-pro --routing {routing} --tokens 128,4096 "
                   f"--chunk-tokens T --no-baseline --json {{out}}/{name}.json", 40)  # fmt: skip


def _many(gpus: int) -> Iterator[Step]:
    """What two GPUs cannot show: tests of as many ranks, and their figures beside a mirror's."""
    files = f"{_files(f'gpu_{name}' for name in MANY_TESTS)} tests/deep_ep/test_deep_ep_gpu.py"
    yield Step("tests-many", f"{PYTEST} -n {4 * gpus} --apart --session-timeout={{seconds}} "
               f"-m 'gpu or multi_gpu' {files}", 300)  # fmt: skip
    sizes, chunks = "--tokens 8,32,128,512,4096", "--chunk-tokens T"
    # The mirror at once behind what it stands for.
    yield Step("pairs-many", f"{BENCH} {sizes} {chunks} --json {{out}}/pairs-many.json", 120)
    yield Step("mirror-many", f"{BENCH} --mirror {gpus} {sizes} {chunks} "
               "--json {out}/mirror-many.json", 90)  # fmt: skip
    for layout in ("by_rank", "grouped"):
        name = f"pairs-24-{layout}"
        yield Step(name, f"{BENCH} --tokens 128,512,4096 {chunks} --num-sms 24 --layout {layout} "
                   f"--no-baseline --json {{out}}/{name}.json", 90)  # fmt: skip
    yield Step("pairs-few", f"{BENCH} --tokens 4096 {chunks} --num-sms 4,6,12,24 --layout by_rank "
               "--no-baseline --json {out}/pairs-few.json", 90)  # fmt: skip
    yield Step("deep-ep-all", f"{BENCH} --api deep_ep {sizes} --json {{out}}/deep-ep-all.json", 150)
    yield Step("deep-ep-beside", f"{BENCH} --api deep_ep {sizes} --deep-ep-module deep_ep "
               "--json {out}/deep-ep-beside.json", 200, needs="deep_ep")  # fmt: skip
    for per_node in (each for each in (4, 2, 1) if each < gpus):
        name = f"nodes-{gpus // per_node}x{per_node}"
        yield Step(name, f"{BENCH} --transport timed --preset cx7 --ranks-per-node {per_node} "
                   f"--tokens 8,128 {chunks} --no-baseline "
                   f"--json {{out}}/{name}.json", 90)  # fmt: skip
    yield Step("megatron-many", f"{BENCH} --api megatron --json {{out}}/megatron-many.json", 120)


def _more(gpus: int) -> Iterator[Step]:
    """Slower, or seldom asked for."""
    yield Step("check", f"{BENCH} --check", 600)
    yield Step("check-apart", f"{BENCH} --check --ranks-per-node 1", 600)
    yield Step("tests-between", f"{PYTEST} -m multi_gpu tests", 600)
    if gpus <= 2:
        for layout in ("by_rank", "grouped"):
            yield Step(f"pairs-24-{layout}", f"{BENCH} --tokens 128,512,4096 --num-sms 24 "
                       f"--layout {layout} --no-baseline", 240)  # fmt: skip
        yield Step("deep-ep-beside", f"{BENCH} --api deep_ep --tokens 8,32,128,512,4096 "
                   "--deep-ep-module deep_ep", 400, needs="deep_ep")  # fmt: skip
    yield Step("mirror", f"{BENCH} --mirror 8 --tokens 8,32,128,512,4096", 240, 1)
    for model in ("deepseek-v4-flash", "deepseek-v4-pro", "kimi-k3", "glm-5"):
        yield _layer(model, 240)
    yield Step("tune-all", "-m moe_p2p tune --into {out}/tuned.json", 400, 1)
    yield Step("kv-others", f"{BENCH} --api kv --tokens 4096 --page-kib 4,16,64 --repeats 3", 200)


def missing(step: Step, gpus: int) -> str:
    """Why it cannot run here; empty: it can."""
    if step.gpus > gpus:
        return f"needs {step.gpus} GPUs, here are {gpus}"
    if "/" in step.needs:
        return "" if Path(step.needs).is_dir() else f"there is no folder {step.needs}"
    if step.needs and not shutil.which(step.needs) and importlib.util.find_spec(step.needs) is None:
        return f"{step.needs} is not installed"
    return ""


def words_of(step: Step, out: Path, limit_s: float) -> list[str]:
    seconds = max(limit_s - PRINTS_S, 1.0)
    command = step.command.replace("{out}", str(out)).replace("{seconds}", f"{seconds:.0f}")
    return [*shlex.split(step.under), sys.executable, *shlex.split(command)]


def run(step: Step, log: Path, limit_s: float) -> tuple[str, float]:
    """Returns "ok", "status N" or "ended at its limit", and its seconds."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment["COLUMNS"] = "160"  # of pytest's summary
    with log.open("w") as out:
        process = subprocess.Popen(
            words_of(step, log.parent, limit_s),
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            nothing = status == NO_TESTS and "-m pytest" in step.command
            what = "no test to run" if nothing else f"status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            what = "ended at its limit"
        finally:  # Ctrl-C, too
            _end(process)
    return what, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    """First kindly, so that ranks take their shared memory away; what it started, too."""
    for number, wait_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def handle_signals() -> None:
    """SIGTERM ends the step, too. Steps end by SIGINT, also where this program ignores it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(arguments: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    groups = ", ".join(GROUPS)
    add("--only", default="", help=f"groups ({groups}), names or beginnings of names (all)")
    add("--list", action="store_true", help="print the steps and run none")
    add("--gpus", type=int, help="of --list (those at hand)")
    add("--base", default="", help="a tree that is timed in turns with this one")
    add("--first", default="", help="the tree whose host time counts as 1, of 4f2cceb (--base)")
    add("--out", type=Path, default=ROOT / "bench_out/gpu", help="folder of logs and figures")
    add("--lines", type=int, default=30, help="of each log that are printed; 0: where one failed")
    add("--total-s", type=float, default=7200, help="of all steps together (7200)")
    chosen = parser.parse_args(arguments)
    gpus = chosen.gpus if chosen.list and chosen.gpus is not None else _count()
    wanted = tuple(filter(None, chosen.only.split(",")))
    base, first = (
        str(Path(each).resolve()) if each else "" for each in (chosen.base, chosen.first)
    )
    found = [each for each in steps(gpus, base, first)
             if each.group in wanted or each.name.startswith(wanted or "")]  # fmt: skip
    if not found:
        parser.error(f"--only: no step is named {chosen.only}; --list prints them")
    if chosen.list:
        for step in found:
            command = " ".join([*step.under.split(), "python", step.command])
            print(f"{step.group:12} {step.name:20} {step.limit_s:5g} s  {command}")
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    out, until = chosen.out.absolute(), time.monotonic() + chosen.total_s
    summary = {}
    for step in found:
        what, took = missing(step, gpus), 0.0
        if not what:
            limit_s, log = min(step.limit_s, until - time.monotonic()), out / f"{step.name}.log"
            what, took = run(step, log, limit_s) if limit_s > 0 else ("no time was left", 0.0)
            lines = chosen.lines if what == "ok" else max(chosen.lines, FAILED_LINES)
            if log.exists() and lines:
                print("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))
        command = " ".join(words_of(step, out, step.limit_s))
        summary[step.name] = {"result": what, "seconds": round(took, 1), "command": command}
        (out / "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"== {step.name}: {what}, {took:.0f} s", flush=True)
    broken = [name for name, each in summary.items()
              if each["result"].startswith(("status", "ended", "no time"))]  # fmt: skip
    print("\n".join(gpu_bars.report(out, list(summary))))
    print(f"{len(summary) - len(broken)} of {len(summary)} ended well or were left out"
          + (f"; not: {', '.join(broken)}" if broken else ""))  # fmt: skip
    return 1 if broken else 0


def _count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    handle_signals()
    sys.exit(main())
