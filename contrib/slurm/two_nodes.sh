#!/usr/bin/env bash
# moe_p2p on two hosts of 8 GPUs under Slurm: doctor on each, then fabric-check among all ranks.
#
#     sbatch contrib/slurm/two_nodes.sh                          # --nodes=4 etc. as with any job
#     sbatch contrib/slurm/two_nodes.sh bench --api deep_ep      # one command in their place
#
# PYTHON (python3): the interpreter that has moe_p2p, at the same path on each host.
# RANKS_PER_HOST (gpu): a number, or one rank for each GPU.
# IMAGE: a container to run in, where Slurm has pyxis (srun --container-image).
#SBATCH --job-name=moe_p2p
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=00:30:00
#SBATCH --output=moe_p2p-%j.out
# Limits of the host where sbatch is called, often 8 MiB of locked memory, stay there.
#SBATCH --propagate=NONE
set -euo pipefail

hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
MASTER_ADDR="${hosts%%$'\n'*}" # the first host, which has node id 0
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a host get ports of their own
PYTHON="${PYTHON:-python3}"
RANKS_PER_HOST="${RANKS_PER_HOST:-gpu}"
export MASTER_ADDR MASTER_PORT PYTHON RANKS_PER_HOST

# One task a host, which may use all of its CPUs.
on_each_host() {
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
    ${IMAGE:+"--container-image=$IMAGE"} "$@"
}
# SLURM_NODEID is 0 in this script, on every job: each task has its own.
ranks() {
  # shellcheck disable=SC2016
  on_each_host --kill-on-bad-exit=1 bash -c 'exec "$PYTHON" -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$RANKS_PER_HOST" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" -m moe_p2p "$@"' ranks "$@"
}

on_each_host --label "$PYTHON" -m moe_p2p doctor || echo "doctor found problems, see above"
if [ $# -gt 0 ]; then
  ranks "$@"
else
  ranks fabric-check --out "fabric_check-$SLURM_JOB_ID"
fi
