#!/bin/bash
#SBATCH --job-name=tr
#SBATCH --nodes=2-3
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
# one dead node does not end the job: the others continue, except without the node
# that runs this script: then `scontrol requeue` the job, or `scancel` it
#SBATCH --no-kill
#SBATCH --open-mode=append

set -u
job="$SLURM_JOB_ID""-${SLURM_RESTART_COUNT:-0}"

# srun exits with the highest code of all nodes, even of one that was excluded or
# killed; the job's own code is that of the first node
own=$(mktemp)
agent='trap : TERM INT HUP QUIT USR1 USR2 # these are for the launcher
"$@"
code=$?
[ "$SLURM_NODEID" != 0 ] || [ ! -f "$0" ] || echo "$code" >"$0"
exit "$code"'
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
    bash -c "$agent" "$own" elasticrun \
    --nnodes=2:3 \
    --nproc-per-node=1 \
    --rdzv-id="$job" \
    --master-store=etcd://e0:2379,e1:2379 \
    --exit-codes=scheduler \
    train.py
code=$?
own_code=$(cat "$own")
rm -f "$own"
case "$own_code" in 0 | 2 | 93 | 99) code=$own_code ;; esac
exit "$code"
