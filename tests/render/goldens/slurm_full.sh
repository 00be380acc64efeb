#!/bin/bash
#SBATCH --job-name=tr
#SBATCH --nodes=2-5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=h100:8
#SBATCH --mem=900G
#SBATCH --partition=gpu,big
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=1-04:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --chdir=/home/me
#SBATCH --exclusive
# one node that dies does not end the job: the others go on
#SBATCH --no-kill
# every node saves a step and leaves before the time is over
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
export NCCL_DEBUG=INFO
export NOTE='it'"'"'s'
# the first node hosts the job's master
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 12000))
job="$SLURM_JOB_ID"

srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task=96 \
    elasticrun \
    --nnodes=2:4 \
    --nproc-per-node=8 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$job" \
    --token-file='/home/me/job token' \
    --tls-cert=/certs/tls.crt \
    --tls-key=/certs/tls.key \
    --tls-ca=/certs/ca.crt \
    --max-restarts=3 \
    --tee=3 \
    --save-at-breakpoint \
    train.py --lr 3e-4 --note 'it'"'"'s $(HOME), "y"	or 1e3: # é' ''
code=$?
again=0
case "$code" in
    99) again=1 ;; # told to leave, and a step of all ranks is saved
    0 | 2 | 93) ;; # done, or hopeless
    *) [ "$SECONDS" -lt 100440 ] || again=1 ;; # the time was over
esac
if [ "$again" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
