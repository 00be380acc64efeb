#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --array=0-7%2
#SBATCH --output=%x-%A_%a.out
# one dead node does not end the job: the others continue, except without the node
# that runs this script: then `scontrol requeue` the job, or `scancel` it
#SBATCH --no-kill
#SBATCH --open-mode=append

set -u
# the first node hosts the job's master
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 9000))
job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"

# srun exits with the highest code of all nodes, even of one that was excluded or
# killed; the job's own code is that of the first node
own=$(mktemp)
agent='trap : TERM INT HUP QUIT USR1 USR2 # these are for the launcher
"$@"
code=$?
[ "$SLURM_NODEID" != 0 ] || [ ! -f "$0" ] || echo "$code" >"$0"
exit "$code"'
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task=4 \
    bash -c "$agent" "$own" elasticrun \
    --nnodes=2 \
    --nproc-per-node=1 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$job" \
    --exit-codes=scheduler \
    sweep.py
code=$?
own_code=$(cat "$own")
rm -f "$own"
case "$own_code" in 0 | 2 | 93 | 99) code=$own_code ;; esac
exit "$code"
