"""Slurm's `scontrol show hostnames` and `srun`, as programs of a job's script, in its environment.

    slurm.py scontrol show hostnames 'h200-[1-2]'
    slurm.py srun --ntasks=2 --ntasks-per-node=1 COMMAND ...

Strict as srun is: options that no script of ours has are refused, each task has numbers of its own
in its environment, and the exit status is the largest of all tasks. `write` makes both programs.
A task runs where TESTS_PLACES says: names of hosts (tests/support/hosts.py), a folder and a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = "TESTS_PLACES"


def write(folder: Path) -> None:
    """Makes both programs in a folder, which goes first on PATH."""
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)


def hostnames(text: str) -> list[str]:
    """Returns the hosts of "a[1-2],b": h200-[1-2] is h200-1 and h200-2, a[08-10] has a08."""
    found = []
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        stem, _, ranges = name.rstrip("]").partition("[")
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else [None]
            found += [stem if n is None else f"{stem}{n:0{len(first)}}" for n in numbers]
    return found


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--cpu-bind", choices=["none"], required=True)  # else one core a task
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--label", action="store_true")
    parser.add_argument("--container-image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    hosts = hostnames(os.environ["SLURM_JOB_NODELIST"])
    if given.ntasks != len(hosts) * given.ntasks_per_node:
        parser.error(f"{given.ntasks} tasks on {len(hosts)} hosts")
    tasks = []
    for number, host in enumerate(hosts):
        own = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0}
        own |= {"SLURM_STEP_ID": 0, "SLURM_NTASKS": given.ntasks, "SLURMD_NODENAME": host}
        if given.container_image:
            own["IN_CONTAINER"] = given.container_image
        environment = os.environ | {name: str(value) for name, value in own.items()}
        command = [sys.executable, __file__, "task", *given.command]
        pipes = {"stdin": subprocess.DEVNULL, "text": True}
        if given.label:
            pipes |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        tasks.append(subprocess.Popen(command, env=environment, **pipes))
    for number, task in enumerate(tasks):
        for line in (task.communicate()[0] or "").splitlines():
            print(f"{number}: {line}", flush=True)
    return max(task.returncode for task in tasks)


def enter(number: int) -> None:
    """Moves this process to its host, whose /etc/hosts knows the others."""
    from tests.support.hosts import Place, bind

    if given := os.environ.get(PLACES):
        names, shm, hosts = json.loads(given)
        Place(names[number], Path(shm, str(number))).enter()
        bind(Path(hosts), "/etc/hosts")


def main() -> int:
    program, *arguments = sys.argv[1:]
    if program == "scontrol":
        assert arguments[:2] == ["show", "hostnames"], arguments
        print("\n".join(hostnames(arguments[2])))
        return 0
    if program == "srun":
        return srun(arguments)
    sys.path.insert(0, str(ROOT))
    enter(int(os.environ["SLURM_NODEID"]))
    return os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
