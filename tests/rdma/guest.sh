#!/bin/bash
# Inside the machine that vm.py boots: makes $DEVICES soft-RoCE devices rxe0.. on network links rn0.. with
# addresses 10.77.0.1.., all on one bridge, runs the command, leaves its exit status and powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/vm/settings.sh
ulimit -l unlimited
for kind in all default; do
  echo 0 >/proc/sys/net/ipv4/conf/$kind/rp_filter
  echo 1 >/proc/sys/net/ipv4/conf/$kind/accept_local
  echo 0 >/proc/sys/net/ipv6/conf/$kind/accept_dad
done
for limit in rmem_max wmem_max rmem_default; do echo 8388608 >/proc/sys/net/core/$limit; done
echo 20000 >/proc/sys/net/core/netdev_max_backlog # packets that are dropped cost a timeout each
for share in $SHARES; do
  mkdir -p "${share#*=}"
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=507904,cache=none "${share%%=*}" "${share#*=}"
done

# Both ends of a connection are on this machine: without routes of their own, by source address, packets
# from one device to another would take the loopback link and never see the wire.
links() {
  echo "link set lo up"
  echo "link add wire type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
  echo "link set wire mtu $MTU up"
  local i j mac
  for ((i = 0; i < DEVICES; i++)); do
    mac=$(printf '02:00:0a:4d:00:%02x' $((i + 1)))
    echo "link add rn$i mtu $MTU address $mac type veth peer name rp$i mtu $MTU"
    echo "link set rp$i master wire up"
    echo "link set rn$i up"
    echo "addr add 10.77.0.$((i + 1))/32 dev rn$i"
  done
  for ((i = 0; i < DEVICES; i++)); do
    for ((j = 0; j < DEVICES; j++)); do
      [ $i = $j ] && continue
      mac=$(printf '02:00:0a:4d:00:%02x' $((j + 1)))
      echo "neigh add 10.77.0.$((j + 1)) lladdr $mac dev rn$i nud permanent"
      echo "route add 10.77.0.$((j + 1))/32 dev rn$i src 10.77.0.$((i + 1)) table $((1000 + i))"
      echo "route add 10.77.0.$((j + 1))/32 dev rn$i metric $((100 + i))"
    done
    echo "rule add pref 10 iif lo from 10.77.0.$((i + 1)) to 10.77.0.0/24 lookup $((1000 + i))"
  done
  echo "rule add pref 100 lookup local"
  echo "rule del pref 0"
}
links | ip -force -batch - >/dev/kmsg 2>&1
for ((i = 0; i < DEVICES; i++)); do
  rdma link add rxe$i type rxe netdev rn$i || echo "vm: no device rxe$i" >/dev/kmsg
  [ -z "$NETEM" ] || tc qdisc replace dev rn$i root netem limit 20000 $NETEM || echo "vm: no netem" >/dev/kmsg
done

. /run/vm/environment.sh
cd "$FOLDER" || cd /
output=$(echo /dev/vport*p1)
bash -c "$(cat /run/vm/command)" 2>&1 </dev/null | cat >"$output"
echo "${PIPESTATUS[0]}" >/run/vm/status
echo o >/proc/sysrq-trigger
sleep 5
