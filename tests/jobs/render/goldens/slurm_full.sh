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
#SBATCH --constraint=[a|b]
#SBATCH --exclude=n[1-4]
# every node saves a step and leaves before the time limit
#SBATCH --signal=USR1@300
# without --no-kill: when Slurm notices that a node is dead, it puts the whole job
# back into the queue; with it, the job would hang if that node runs this script
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
export NCCL_DEBUG=INFO
export NOTE='it'"'"'s'
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
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task=96 \
    bash -c "$agent" "$own" elasticrun \
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
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --exit-codes=scheduler \
    train.py --lr 3e-4 --note 'it'"'"'s $(HOME), "y"	or 1e3: # é' ''
code=$?
own_code=$(cat "$own")
rm -f "$own"
case "$own_code" in 0 | 2 | 93 | 99) code=$own_code ;; esac
again=0
case "$code" in
    99) again=1 ;; # told to leave, and a step of all ranks is saved
    0 | 2 | 93) ;; # done, or hopeless
    *) [ "$SECONDS" -lt 100440 ] || again=1 ;; # the time limit was reached
esac
if [ "$again" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
