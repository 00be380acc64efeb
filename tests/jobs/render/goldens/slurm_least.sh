#!/bin/bash
#SBATCH --job-name=tr
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
# one dead node does not end the job: the others continue, except without the node
# that runs this script: then `scontrol requeue` the job, or `scancel` it
#SBATCH --no-kill
#SBATCH --open-mode=append

set -u
# the first node hosts the job's master
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 9000))
job="$SLURM_JOB_ID"

srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
    elasticrun \
    --nnodes=1 \
    --nproc-per-node=1 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$job" \
    --exit-codes=scheduler \
    train.py
code=$?
exit "$code"
