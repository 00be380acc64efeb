#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --array=0-7%2
#SBATCH --output=%x-%A_%a.out
# one node that dies does not end the job: the others go on
#SBATCH --no-kill
#SBATCH --open-mode=append

set -u
# the first node hosts the job's master
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 12000))
job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"

srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task=4 \
    elasticrun \
    --nnodes=2 \
    --nproc-per-node=1 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$job" \
    sweep.py
code=$?
exit "$code"
