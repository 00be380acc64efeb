#!/bin/bash
#SBATCH --job-name=tr
#SBATCH --nodes=2-3
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
# one node that dies does not end the job: the others go on
#SBATCH --no-kill
#SBATCH --open-mode=append

set -u
job="$SLURM_JOB_ID""-${SLURM_RESTART_COUNT:-0}"

srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
    elasticrun \
    --nnodes=2:3 \
    --nproc-per-node=1 \
    --rdzv-id="$job" \
    --master-store=etcd://e0:2379,e1:2379 \
    train.py
code=$?
exit "$code"
