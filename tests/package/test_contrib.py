"""contrib/: what Slurm and Kubernetes would start on each host, and that it runs.

Linters of scripts and of the Dockerfile run in test_lint.py. Cheap tests record what each host
would run; those marked `more` run it between network namespaces, with torchrun.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts, slurm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "contrib/slurm/two_nodes.sh"
JOBS = sorted((ROOT / "contrib/k8s").glob("*.yaml"))
# What sbatch gives a script of two hosts (Slurm 23.11); a task's numbers there are the script's.
SLURM = {
    "SLURM_CLUSTER_NAME": "gpu",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "8",
    "SLURM_JOBID": "48213",
    "SLURM_JOB_CPUS_PER_NODE": "192(x2)",
    "SLURM_JOB_ID": "48213",
    "SLURM_JOB_NODELIST": "h200-st-p5en-[09-10]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "h200-st-p5en-[09-10]",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASK_PID": "2113",
}
PATCHES = sorted((ROOT / "contrib").rglob("*.patch"))
POD = "moe-p2p-0.moe-p2p"
NAMES = ["h200-st-p5en-09", "h200-st-p5en-10"]
# Stands for Python: writes what it was asked for, on which host.
RECORDER = """#!/usr/bin/env bash
file=$(mktemp -p "$TESTS_RECORDS")
printf '%s\\n' "${SLURM_NODEID:-}" "${JOB_COMPLETION_INDEX:-}" "${IN_CONTAINER:-}" "$@" > "$file"
bundle=fabric_check/bundle.tar.gz
[ "${TESTS_BUNDLE:-none}" != "${JOB_COMPLETION_INDEX:-}" ] || install -D "$0" "$bundle"
[ "$*" != "-m moe_p2p doctor" ] || { echo "a healthy host"; exit "${TESTS_DOCTOR:-0}"; }
exit "${TESTS_STATUS:-0}"
"""
TINY = "bench --quick --device=cpu --tokens=1,4 --seconds=0.05 --checks=2 --experts=8 --hidden=256"
RAILS = "fabric-check --quick --device=cpu --only=rails"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.parent.name)
def test_a_patch_is_whole_and_says_what_it_changes(patch: Path) -> None:
    """Whether it applies is tested where the other project's files are (tests/engines)."""
    counted = subprocess.check_output(["git", "apply", "--numstat", str(patch)], text=True)
    added = sum(int(line.split()[0]) for line in counted.splitlines())
    text = patch.read_text()
    assert f"{len(counted.splitlines())} files changed, {added} insertions(+)" in text
    assert re.search(r"^From: moe_p2p maintainers .+\nDate: .+\nSubject: \[PATCH\] ", text, re.M)


def records(folder: Path) -> list[list[str]]:
    return sorted(file.read_text().splitlines() for file in folder.iterdir())


@pytest.fixture(name="recorder")
def stand_in_for_python(tmp_path: Path) -> dict[str, str]:
    """The environment in which `python3` and Slurm's programs are stand-ins."""
    programs, found = tmp_path / "bin", tmp_path / "records"
    programs.mkdir(), found.mkdir()
    (programs / "python3").write_text(RECORDER)
    (programs / "python3").chmod(0o755)
    slurm.write(programs)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "TESTS_RECORDS": str(found)}


def run_script(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """As slurmd does: a copy of the script, under a name of its own."""
    return subprocess.run(
        ["bash", "-s", "--", *arguments],
        input=SCRIPT.read_text(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


def torchrun(host: int, master: str, port: str, *command: str, ranks: str = "gpu") -> list[str]:
    return [
        *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"),
        *(f"--nproc-per-node={ranks}", f"--master-addr={master}", f"--master-port={port}"),
        *("-m", "moe_p2p", *command),
    ]


def test_slurm_starts_torchrun_with_numbers_of_each_host(recorder: dict[str, str]) -> None:
    ran = run_script(recorder | SLURM)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["0: a healthy host", "1: a healthy host"]
    wanted = [
        [str(host), "", "", *command]
        for host in range(2)
        for command in (
            ["-m", "moe_p2p", "doctor"],
            torchrun(host, NAMES[0], "28213", "fabric-check", "--out", "fabric_check-48213"),
        )
    ]
    assert records(Path(recorder["TESTS_RECORDS"])) == sorted(wanted)


def test_slurm_takes_another_command_ranks_and_a_container(recorder: dict[str, str]) -> None:
    given = {"RANKS_PER_HOST": "2", "IMAGE": "moe_p2p.sqsh"}
    command = ["bench", "--plot", "a b.svg"]
    ran = run_script(recorder | SLURM | given, *command)
    assert ran.returncode == 0, ran.stderr
    found = [each for each in records(Path(recorder["TESTS_RECORDS"])) if "doctor" not in each]
    assert found == [
        [str(host), "", "moe_p2p.sqsh", *torchrun(host, NAMES[0], "28213", *command, ranks="2")]
        for host in range(2)
    ]


def test_slurm_goes_on_after_doctor_and_ends_with_ranks_that_fail(
    recorder: dict[str, str],
) -> None:
    ran = run_script(recorder | SLURM | {"TESTS_DOCTOR": "1", "TESTS_STATUS": "3"})
    assert "doctor found problems, see above" in ran.stdout
    assert ran.returncode == 3
    found = records(Path(recorder["TESTS_RECORDS"]))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("h200-st-p5en-[09-10]", NAMES),
        ("a1,b[7,09-11],c", ["a1", "b7", "b09", "b10", "b11", "c"]),
    ],
)
def test_the_stand_in_expands_hosts_as_slurm_does(text: str, wanted: list[str]) -> None:
    assert slurm.hostnames(text) == wanted


# --- Kubernetes ---


def objects_of(job: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (requirements-dev.txt)")
    return list(yaml.safe_load_all(job.read_text()))


def pod_of(job: Path) -> dict[str, Any]:
    (found,) = (each for each in objects_of(job) if each["kind"] == "Job")
    pod: dict[str, Any] = found["spec"]["template"]
    return pod


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_jobs_fit_kubernetes_schemas(job: Path) -> None:
    """Strict: a field that Kubernetes does not have is an error."""
    library = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for each in objects_of(job):
        for version in ("1.27", library.latest_version()):
            library.validate(each, version, strict=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_parts_of_a_job_name_each_other(job: Path) -> None:
    service, found = objects_of(job)
    name, spec = found["metadata"]["name"], found["spec"]
    pod = spec["template"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert int(values["HOSTS"]) == spec["completions"] == spec["parallelism"]
    assert f"master={name}-0.{service['metadata']['name']}\n" in container["args"][0]
    (one_a_host,) = pod["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert one_a_host["labelSelector"]["matchLabels"] == pod["metadata"]["labels"]
    networks = pod["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks", "")
    rails = [f"nvidia.com/{rail.strip()}" for rail in networks.split(",") if rail]
    limits = container["resources"]["limits"]
    assert [key for key in limits if "rail" in key] == rails
    assert rails or limits["vpc.amazonaws.com/efa"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_jobs_differ_in_their_networks_alone() -> None:
    first, second = (pod_of(job)["spec"]["containers"][0] for job in JOBS)
    for container in (first, second):
        limits = container["resources"]["limits"]
        for name in list(limits):
            if "efa" in name or "rail" in name or "hugepages" in name:
                del limits[name]
    assert first == second


def pod_command(job: Path, host: int, **given: str) -> tuple[list[str], dict[str, str]]:
    """Returns a pod's command, and its environment: the Job's controller sets the index."""
    pod = pod_of(job)
    (container,) = pod["spec"]["containers"]
    own = {each["name"]: each["value"] for each in container["env"]}
    own |= {"JOB_COMPLETION_INDEX": str(host), "HOSTNAME": f"moe-p2p-{host}"}
    own |= {"KUBERNETES_SERVICE_HOST": "172.20.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    return [*container["command"], *container["args"]], own | given


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_pod_starts_torchrun_with_its_index(job: Path, recorder: dict[str, str]) -> None:
    getent = Path(recorder["PATH"].split(os.pathsep)[0], "getent")
    getent.write_text('#!/bin/sh\n[ "$*" = "hosts moe-p2p-0.moe-p2p" ]\n')
    getent.chmod(0o755)
    for host in range(2):
        command, own = pod_command(job, host)
        ran = subprocess.run(command, env=recorder | own, check=True, capture_output=True)
        assert ran.stdout.splitlines() == [b"a healthy host"]
    wanted = [
        ["", str(host), "", *command]
        for host in range(2)
        for command in (
            ["-m", "moe_p2p", "doctor"],
            torchrun(host, POD, "29500", "fabric-check"),
        )
    ]
    assert records(Path(recorder["TESTS_RECORDS"])) == sorted(wanted)
    failed = subprocess.run(command, env=recorder | own | {"TESTS_STATUS": "3"}, check=False)
    assert failed.returncode == 3


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
@pytest.mark.parametrize("status", [0, 2])
def test_the_log_of_pods_has_the_bundle_however_they_end(
    job: Path, status: int, recorder: dict[str, str], tmp_path: Path
) -> None:
    """And the command in the head of the job finds it there."""
    getent = Path(recorder["PATH"].split(os.pathsep)[0], "getent")
    getent.write_text("#!/bin/sh\n")
    getent.chmod(0o755)
    log = b""
    for host in range(2):
        command, own = pod_command(job, host)
        own |= {"TESTS_BUNDLE": "0", "TESTS_STATUS": str(status)}
        folder = tmp_path / str(host)
        folder.mkdir()
        ran = subprocess.run(
            command, env=recorder | own, cwd=folder, check=False, capture_output=True, timeout=60
        )
        assert ran.returncode == status
        log += ran.stdout
    (tmp_path / "moe_p2p.log").write_bytes(log)
    (line,) = re.findall(r"^#     (sed .*)$", job.read_text(), re.MULTILINE)
    assert line in (ROOT / "docs/clusters.md").read_text()
    subprocess.run(["bash", "-euc", line], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "bundle.tar.gz").read_text() == RECORDER


# --- the same for real, between network namespaces ---


@pytest.fixture(name="both")
def two_hosts() -> Any:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    with hosts.Hosts(2) as both:
        yield both


def environment_of_hosts(both: hosts.Hosts, folder: Path, names: list[str]) -> dict[str, str]:
    """Of processes that move to a host themselves; names are those of hosts in /etc/hosts."""
    listed = folder / "hosts"
    lines = [f"{both.address(host)} {name}" for host, name in enumerate(names)]
    listed.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    shm = both.place(0).shm.parent
    both.place(1)
    programs = folder / "bin"
    programs.mkdir()
    slurm.write(programs)
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RANKS_PER_HOST": "2",
        "MOE_P2P_TRANSPORT": "libfabric",
        "MOE_P2P_TRANSPORT_SETTINGS": "provider=tcp,interfaces=eth0",
        slurm.PLACES: json.dumps([both.names, str(shm), str(listed)]),
    }


def check_table(output: str) -> None:
    """Rank 0 prints it, of four ranks on two hosts, each of which is a node."""
    (head,) = re.findall(r"^4 CPU ranks, 2 nodes of 2, .*$", output, re.MULTILINE)
    assert ", 2 hosts, " in head, output


@pytest.mark.more
@pytest.mark.timeout(900)
def test_the_script_of_slurm_runs_between_hosts(
    both: hosts.Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_script(environment_of_hosts(both, tmp_path, NAMES) | SLURM, *TINY.split())
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert {line[:3] for line in ran.stdout.splitlines() if "Linux" in line} == {"0: ", "1: "}
    check_table(ran.stdout)


@pytest.mark.more
@pytest.mark.timeout(900)
def test_pods_of_an_indexed_job_run_between_hosts(both: hosts.Hosts, tmp_path: Path) -> None:
    names = [f"moe-p2p-{host}.moe-p2p" for host in range(2)]
    environment = environment_of_hosts(both, tmp_path, names)
    pods = []
    for host in range(2):
        command, own = pod_command(
            JOBS[0], host, RANKS_PER_HOST="2", COMMANDS=f"\n{TINY}\n{RAILS}\n"
        )
        own["SLURM_NODEID"] = str(host)  # for the stand-in's task, which moves to the host
        task = [sys.executable, slurm.__file__, "task", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pods.append(subprocess.Popen(task, env=environment | own, cwd=tmp_path, **pipes))
    outputs = [pod.communicate(timeout=800)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n---\n".join(outputs)[-8000:]
    check_table(outputs[0])
    assert "BEGIN bundle" not in outputs[1]
    (log,) = re.findall(r"^BEGIN bundle\n(.*)^END bundle$", outputs[0], re.MULTILINE | re.DOTALL)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(log))) as bundle:
        file = bundle.extractfile("bundle.json")
        assert file is not None
        assert {row["problem"] for row in json.load(file)["rails"]} == {""}
