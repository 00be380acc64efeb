#!/bin/bash
# elasticrun render slurm --name pretrain --nnodes 2:4 --spares 1 --gpus-per-node 8 --time 4:00:00 --requeue 5 --cpus-per-task 32 --max-restarts 3 --save-at-breakpoint -- examples/pretrain.py --dir /shared/runs/pretrain
#SBATCH --job-name=pretrain
#SBATCH --nodes=2-5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.out
# every node saves a step and leaves before the time limit
#SBATCH --signal=TERM@120
# without --no-kill: when Slurm notices that a node is dead, it puts the whole job
# back into the queue; with it, the job would hang if that node runs this script
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
# the first node hosts the job's master
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 9000))
job="$SLURM_JOB_ID"

# srun exits with the highest code of all nodes, even of one that was excluded or
# killed; the job's own code is that of the first node
own=$(mktemp)
agent='trap : TERM INT HUP QUIT USR1 USR2 # these are for the launcher
"$@"
code=$?
[ "$SLURM_NODEID" != 0 ] || [ ! -f "$0" ] || echo "$code" >"$0"
exit "$code"'
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task=32 \
    bash -c "$agent" "$own" elasticrun \
    --nnodes=2:4 \
    --nproc-per-node=8 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$port" \
    --rdzv-id="$job" \
    --max-restarts=3 \
    --save-at-breakpoint \
    --exit-codes=scheduler \
    examples/pretrain.py --dir /shared/runs/pretrain
code=$?
own_code=$(cat "$own")
rm -f "$own"
case "$own_code" in 0 | 2 | 93 | 99) code=$own_code ;; esac
again=0
case "$code" in
    99) again=1 ;; # told to leave, and a step of all ranks is saved
    0 | 2 | 93) ;; # done, or hopeless
    *) [ "$SECONDS" -lt 14220 ] || again=1 ;; # the time limit was reached
esac
if [ "$again" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
