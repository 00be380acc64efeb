"""Environments as schedulers make them. Where each came from stands with it."""

from __future__ import annotations

# Recorded on Slurm 22.05.8 (four machines by network namespaces), 2026-11-22, without what says
# nothing here (paths, uids, ports of srun).

SRUN = {  # srun -N2 --ntasks-per-node=1, the second task; a job that srun itself has made
    "SLURMD_NODENAME": "node3", "SLURM_CPUS_ON_NODE": "1", "SLURM_GTIDS": "1", "SLURM_JOBID": "1",
    "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[2-3]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1", "SLURM_LOCALID": "0", "SLURM_NNODES": "2",
    "SLURM_NODEID": "1", "SLURM_NODELIST": "node[2-3]", "SLURM_NPROCS": "2", "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "1", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_SUBMIT_HOST": "node1",
    "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_TOPOLOGY_ADDR": "node3",
}  # fmt: skip

CROWD = SRUN | {  # srun -N2 -n4, the last task
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip

BATCH = {  # the batch script of sbatch -N2 -n4: PROCID and NODEID are 0, and there is no step
    "SLURMD_NODENAME": "node2", "SLURM_CPUS_ON_NODE": "2", "SLURM_GTIDS": "0", "SLURM_JOBID": "3",
    "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node[2-3]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "node[2-3]",
    "SLURM_NODE_ALIASES": "(null)", "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_TASK_PID": "40",
}  # fmt: skip

SALLOC = {  # a command of salloc -N2, on the host where salloc was typed
    "SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[2-3]",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NODELIST": "node[2-3]",
    "SLURM_NODE_ALIASES": "(null)", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip

PTY = {  # srun -N2 --pty bash: a step like any other, but for its terminal
    **SRUN, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "36405",
}  # fmt: skip

STEP_OF_BATCH = BATCH | {  # srun -N2 -n2 --ntasks-per-node=1 in that batch script, its first task
    "SLURM_NTASKS": "2", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip

ARRAY = STEP_OF_BATCH | {  # a step in task 3 of sbatch --array=3,7: a job id of its own
    "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_JOB_ID": "5",
    "SLURM_JOBID": "5",
}  # fmt: skip

REQUEUED = STEP_OF_BATCH | {"SLURM_RESTART_COUNT": "1"}  # after scontrol requeue: step 0 again

# A shell of salloc where the site has use_interactive_step: Slurm's own step of one node, with the
# number that is in a listing of such a shell on the web (SLURM_STEP_ID=4294967290, with a pty).
INTERACTIVE = SALLOC | {
    "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PROCID": "0",
    "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node2", "SLURM_PTY_PORT": "34889",
}  # fmt: skip

# Every pod has these two from the kubelet (kubernetes.io, "Service environment variables").
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}

# An Indexed Job's pod gets its index and nothing else; seen on a 1.36 control plane.
INDEXED = POD | {"JOB_COMPLETION_INDEX": "2"}

# LeaderWorkerSet: names and the form of the address from its own controller's tests
# (test-sample-1.test-sample-1.NAMESPACE); LWS_WORKER_INDEX from version 0.6 on.
LWS = POD | {
    "LWS_LEADER_ADDRESS": "train-1.train.research", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3",
}  # fmt: skip

# Volcano: its documentation of the plugins svc (VC_*_HOSTS, VC_*_NUM) and env (VC_TASK_INDEX).
VOLCANO = POD | {
    "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_WORKER_NUM": "3",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job,job-worker-2.job",
}  # fmt: skip

# Volcano's plugin pytorch: nodes of all roles counted together.
VOLCANO_PYTORCH = VOLCANO | {
    "VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "job-master-0.job", "MASTER_ADDR": "job-master-0.job",
    "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "2",
}  # fmt: skip

# A PyTorchJob's worker, as Arena submits it: RANK is the replica's index + 1.
PYTORCH_JOB = POD | {
    "MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2",
    "PYTHONUNBUFFERED": "0",
}  # fmt: skip

# training-operator 1.9 says the same by PET_ as well.
TRAINER_1 = PYTORCH_JOB | {
    "PET_NNODES": "3", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "mnist-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip

# ... and of an elastic one:
TRAINER_1_ELASTIC = POD | {
    "PET_RDZV_ENDPOINT": "echo-worker-0:29400", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "echo",
    "PET_NNODES": "1:3", "PET_MAX_RESTARTS": "10",
}  # fmt: skip

# Kubeflow Trainer v2: its torch plugin; a JobSet underneath, so there is an index too.
TRAINER_2 = POD | {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "llm-node-0-0.llm", "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "3",
}  # fmt: skip

# DLRover's operator: the names it gives to a pod.
DLROVER = POD | {
    "ELASTIC_JOB_NAME": "gpt", "JOB_UID": "8c1", "NODE_TYPE": "worker", "NODE_ID": "2",
    "NODE_NUM": "4", "NODE_RANK": "2", "DLROVER_MASTER_ADDR": "elasticjob-gpt-dlrover-master:50001",
    "POD_NAME": "gpt-edljob-worker-2", "RANK": "2", "WORLD_SIZE": "4",
}  # fmt: skip

# SkyPilot's documentation of its variables.
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_mine_1",
}  # fmt: skip
