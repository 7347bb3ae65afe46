#!/bin/busybox sh
# First process of the machine that vm.py boots: loads the modules of /m in order, puts a writable layer
# over the host's root file system (9p, read-only) and goes on there with guest.sh.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
while read -r module; do $b insmod "/m/$module" || echo "vm: no module $module" >/dev/kmsg; done </m/order
share() { $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=507904,$1" "$2" "$3"; }
share cache=loose,ro host /lower || { echo "vm: no root file system" >/dev/kmsg; $b reboot -f; }
$b mount -t tmpfs -o size=80% tmpfs /upper
$b mkdir -p /upper/files /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work,index=off,xino=off \
  overlay /target || { echo "vm: no overlay" >/dev/kmsg; $b reboot -f; }
for kind in proc sys dev; do $b mount -o move /$kind /target/$kind; done
$b mkdir -p /target/dev/shm /target/dev/pts
$b mount -t tmpfs -o mode=1777 tmpfs /target/dev/shm
$b mount -t devpts devpts /target/dev/pts
$b mount -t tmpfs tmpfs /target/run
$b mkdir -p /target/run/vm
share cache=none control /target/run/vm
exec $b switch_root /target /bin/bash /run/vm/guest.sh </target/dev/null >/target/dev/ttyS0 2>&1
