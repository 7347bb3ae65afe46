"""Runs a command in a throw-away machine with RDMA devices: soft-RoCE on a stock kernel in QEMU.

    python tests/rdma/vm.py [--devices N] [--netem "loss 1%"] [--timeout S] -- command ...

The machine sees this one's root file system read-only below a writable layer that vanishes with it:
the same programs, paths, working folder and environment. It needs no KVM, no module on this machine
and no network. Root is needed only to install what is missing (QEMU, busybox, rdma tools, by
package name); kernel and modules come from Debian's package, unpacked, not installed. First use
takes about 20 s, a run 5 s and the command. The command's output and exit status come back; 124 is
the deadline.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import lzma
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("MOE_P2P_VM_CACHE", Path.home() / ".cache" / "moe_p2p_vm"))
# program: Debian's package
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
}
DRIVER, DRIVER_PACKAGE = "/usr/lib/*/libibverbs/librxe-rdmav*.so", "ibverbs-providers"
MODULES = (
    "virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic ib_uverbs rdma_ucm rdma_rxe"
    " veth bridge sch_netem"
)
# What QEMU's translator does slowly is left out: byte-wise string moves, carry-less multiplication.
CPU = "max,-la57,-pclmulqdq,-smap,-erms,-fsrm"
KERNEL_OPTIONS = (
    "console=ttyS0 loglevel=5 panic=-1 nokaslr mitigations=off random.trust_cpu=on no_timer_check "
    "tsc=reliable audit=0 apparmor=0 selinux=0 cryptomgr.notests net.ifnames=0 "
    "rcupdate.rcu_expedited=1"
)
TIMED_OUT, BROKEN = 124, 125


class UnavailableError(RuntimeError):
    """The machine cannot be booted here; the text says why."""


def path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing_packages() -> list[str]:
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=path())]
    return missing + ([] if glob.glob(DRIVER) else [DRIVER_PACKAGE])


def why_not() -> str:
    """Why it cannot run here; empty when it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the RDMA machine is built for Linux on x86-64, this is {platform.machine()}"
    if not shutil.which("apt-get"):
        return "the RDMA machine takes its kernel from Debian's packages; there is no apt-get here"
    missing = missing_packages()
    if missing and os.geteuid() != 0:
        return f"not root, and packages are missing: apt-get install {' '.join(missing)}"
    return ""


def call(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PATH": path(), "DEBIAN_FRONTEND": "noninteractive"},
    )
    if done.returncode != 0:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr[-500:]}")
    return done.stdout


def apt(*command: str, cwd: Path | None = None) -> None:
    try:
        call("apt-get", *command, cwd=cwd)
    except UnavailableError:
        call("apt-get", "update")
        call("apt-get", *command, cwd=cwd)


def kernel_package() -> str:
    for line in call("apt-cache", "depends", "linux-image-amd64").splitlines():
        kind, _, name = line.strip().partition(" ")
        if kind == "Depends:" and name.startswith("linux-image-"):
            return name
    raise UnavailableError("apt knows no linux-image-amd64")


def uncompressed(image: bytes) -> bytes:
    """The kernel inside a bzImage. QEMU starts it directly, which saves unpacking it in there."""
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = 512 * (setup_sectors + 1) + offset
    try:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(image[start : start + length])
    except lzma.LZMAError:
        return image


def unpack_kernel() -> Path:
    """The folder with `vmlinux` and `lib/modules`."""
    package = kernel_package()
    folder = CACHE / package
    if (folder / "vmlinux").exists():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        apt("download", package, cwd=Path(scratch))
        archive = next(Path(scratch).glob("*.deb"))
        call("dpkg-deb", "-x", str(archive), str(folder))
    image = next((folder / "boot").glob("vmlinuz*"))
    version = next((folder / "lib/modules").iterdir()).name
    call("depmod", "-b", str(folder), version)
    (folder / "vmlinux.part").write_bytes(uncompressed(image.read_bytes()))
    (folder / "vmlinux.part").rename(folder / "vmlinux")
    return folder


def module_files(kernel: Path) -> list[Path]:
    """In the order to load them."""
    version = next((kernel / "lib/modules").iterdir()).name
    files: list[Path] = []
    for module in MODULES.split():
        for line in call(
            "modprobe", "-d", str(kernel), "-S", version, "--show-depends", module
        ).splitlines():
            words = line.split()
            if words[0] == "insmod" and Path(words[1]) not in files:
                files.append(Path(words[1]))
    return files


def build_initrd(kernel: Path) -> Path:
    init = (HERE / "init.sh").read_bytes()
    key = hashlib.sha256(init + MODULES.encode()).hexdigest()[:16]
    image = kernel / f"initrd.{key}"
    if image.exists():
        return image
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        root = Path(scratch)
        for name in ("bin", "m", "proc", "sys", "dev", "lower", "upper", "target"):
            (root / name).mkdir()
        busybox = shutil.which("busybox", path=path())
        assert busybox is not None
        shutil.copy(busybox, root / "bin/busybox")
        (root / "init").write_bytes(init)
        (root / "init").chmod(0o755)
        files = module_files(kernel)
        for file in files:
            data = file.read_bytes()
            name = file.name.removesuffix(".xz")
            (root / "m" / name).write_bytes(lzma.decompress(data) if name != file.name else data)
        order = "".join(file.name.removesuffix(".xz") + "\n" for file in files)
        (root / "m/order").write_text(order)
        call("sh", "-c", f"find . | cpio -o -H newc --quiet > {image}.part", cwd=root)
    Path(f"{image}.part").rename(image)
    return image


def prepare() -> tuple[Path, Path]:
    """Installs and unpacks what is missing; returns kernel and initial file system."""
    reason = why_not()
    if reason:
        raise UnavailableError(reason)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = missing_packages()
        if missing:
            apt("install", "-y", "--no-install-recommends", *missing)
        kernel = unpack_kernel()
        return kernel / "vmlinux", build_initrd(kernel)


def write_control(
    folder: Path, command: Sequence[str], devices: int, netem: str, writable: Sequence[Path]
) -> None:
    skip = {"PWD", "OLDPWD", "SHLVL", "TMPDIR"}
    environment = {k: v for k, v in os.environ.items() if k not in skip and k.isidentifier()}
    environment["MOE_P2P_RDMA_MACHINE"] = "1"  # where tests may take links down
    lines = (f"export {k}={shlex.quote(v)}\n" for k, v in environment.items())
    (folder / "environment.sh").write_text("".join(lines))
    settings = {
        "DEVICES": str(devices),
        "MTU": "4200",  # of the links: gives a path MTU of 4096
        "NETEM": netem,
        "FOLDER": str(Path.cwd()),
        "SHARES": " ".join(f"share{i}={path}" for i, path in enumerate(writable)),
    }
    lines = (f"{k}={shlex.quote(v)}\n" for k, v in settings.items())
    (folder / "settings.sh").write_text("".join(lines))
    (folder / "command").write_text(shlex.join(command))
    shutil.copy(HERE / "guest.sh", folder / "guest.sh")


def share(tag: str, path: Path | str, read_only: bool = False) -> list[str]:
    fs = f"local,id={tag},path={path},security_model=none,multidevs=remap"
    return [
        "-fsdev",
        fs + (",readonly=on" if read_only else ""),
        "-device",
        f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]


def run(
    command: Sequence[str],
    *,
    devices: int = 2,
    netem: str = "",
    timeout_s: float = 600,
    memory_mib: int = 3072,
    writable: Sequence[Path] = (),
    output: int | None = None,
) -> int:
    """Returns the command's exit status; its output goes to the file descriptor, or to ours."""
    kernel, initrd = prepare()
    with tempfile.TemporaryDirectory(prefix="moe_p2p_vm.") as scratch:
        control = Path(scratch)
        write_control(control, command, devices, netem, writable)
        os.mkfifo(control / "output")
        qemu = [
            "qemu-system-x86_64",
            *("-M", "q35,usb=off,smbus=off,hpet=off", "-accel", "tcg,thread=multi,tb-size=512"),
            *("-cpu", CPU, "-smp", str(min(os.cpu_count() or 1, 4)), "-m", str(memory_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(kernel), "-initrd", str(initrd), "-append", KERNEL_OPTIONS),
            *("-serial", f"file:{control / 'kernel.log'}"),
            *share("host", "/", read_only=True),
            *share("control", control),
            *(word for i, path in enumerate(writable) for word in share(f"share{i}", path)),
            *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
            *("-chardev", f"file,id=out,path={control / 'output'}"),
            *("-device", "virtserialport,chardev=out,name=out"),
        ]
        reader = threading.Thread(target=copy_output, args=(control / "output", output))
        reader.start()
        machine = subprocess.Popen(
            qemu, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path()}
        )
        try:
            machine.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"vm: not done within {timeout_s} s", file=sys.stderr)
            return TIMED_OUT
        finally:
            machine.kill()
            machine.wait()
            with suppress(OSError):  # nobody has opened it: the reader still waits
                os.close(os.open(control / "output", os.O_WRONLY | os.O_NONBLOCK))
            reader.join()
        status = control / "status"
        if status.exists():
            return int(status.read_text())
        log = control / "kernel.log"
        print(
            f"vm: ended early:\n{log.read_text()[-2000:] if log.exists() else ''}", file=sys.stderr
        )
        return BROKEN


def copy_output(source: Path, target: int | None) -> None:
    with open(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65536):
            if target is None:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            else:
                os.write(target, chunk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--netem", default="", help='for example "loss 1%%" or "delay 200us"')
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--memory", type=int, default=3072, help="MiB")
    parser.add_argument("--writable", type=Path, action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        return run(
            command,
            devices=arguments.devices,
            netem=arguments.netem,
            timeout_s=arguments.timeout,
            memory_mib=arguments.memory,
            writable=[path.resolve() for path in arguments.writable],
        )
    except UnavailableError as error:
        print(f"vm: {error}", file=sys.stderr)
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
