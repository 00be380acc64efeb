"""Command lines whose whole output is kept in goldens/, one file a case."""

from __future__ import annotations

_FULL = (
    "--name", "llm", "--image", "registry.example:5000/team/llm@sha256:" + "0a" * 32,
    "--namespace", "research", "--nnodes", "2:4", "--pods", "5", "--nproc-per-node", "8",
    "--gpu-resource", "nvidia.com/gpu", "--cpu", "96", "--memory", "900Gi", "--shm", "64Gi",
    "--rdma", "rdma/hca_shared", "--host-network", "--working-dir", "/work",
    "--volume", "data=pvc:corpus:/data:ro", "--volume", "scratch=empty:100Gi:/scratch",
    "--volume", "cache=host:/var/cache/llm:/cache", "--volume", "certs=secret:llm-tls:/certs",
    "--volume", "conf=configmap:llm-conf:/conf",
    "--volume",
    "bucket=csi:gcsfuse.csi.storage.gke.io,bucketName=b,mountOptions=implicit-dirs,,uid=1000:/b",
    "--env", "NCCL_DEBUG=INFO", "--env", "HASH=1e3", "--env", "TEMPLATE=$(HOME)/$$x",
    "--token-secret", "llm-token", "--label", "team=llm",
    "--annotation", "gke-gcsfuse/volumes=true", "--selector", "gpu=h100",
    "--toleration", "nvidia.com/gpu", "--toleration", "spot=yes:NoSchedule",
    "--service-account", "trainer", "--priority", "high", "--image-pull-secret", "registry",
    "--grace", "90", "--ttl", "3600", "--deadline", "86400", "--suspend", "--rbac",
    "--gang", "volcano", "--queue", "research",
)  # fmt: skip
_LAUNCHER = (
    "--max-restarts", "3", "--save-at-breakpoint", "--tls-cert=/certs/tls.crt",
    "--tls-key=/certs/tls.key", "--tls-ca=/certs/ca.crt", "--tee", "3",
)  # fmt: skip
_SCRIPT = ("--", "train.py", "--lr", "3e-4", "--note", 'it\'s $(HOME), "y"\tor 1e3: # é', "")

_ARENA = (
    "pytorch", "--name=bert", "--gpus=2", "--workers=3", "--working-dir=/root",
    "--image=registry.example/team/bert:2.1", "--image-pull-secret=registry", "--sync-mode=git",
    "--sync-source=https://code.example/team/bert.git", "--env=GIT_SYNC_REV=" + "0a" * 20,
    "--git-secret=code", "--env=NCCL_DEBUG=INFO", "--data=corpus:/data", "--data", "runs:/runs",
    "--tensorboard", "--logdir=/runs/tb", "--share-memory=2Gi", "--gang", "--priority=high",
    "--toleration=gpu=yes:NoSchedule,Equal", "--selector=pool=a100", "--rdma",
    "--running-timeout=2h30m", "--ttl-after-finished=1h", "--clean-task-policy=Running",
    "--token-secret=bert", "python -u /root/code/bert/main.py --lr 1e-4",
)  # fmt: skip

CASES: dict[str, tuple[str, ...]] = {
    "k8s_arena.yaml": ("k8s", *_ARENA),
    "k8s_least.yaml": ("k8s", "--name", "tr", "--image", "repo/train:1.0", "--", "train.py"),
    "k8s_elastic.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--nproc-per-node", "8", "--gpu-resource", "nvidia.com/gpu", *_LAUNCHER, "--", "train.py",
    ),
    "k8s_full.yaml": ("k8s", *_FULL, *_LAUNCHER, *_SCRIPT),
    "k8s_full.json": ("k8s", "-o", "json", *_FULL, *_LAUNCHER, *_SCRIPT),
    "k8s_kueue.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4", "--gang", "kueue",
        "--queue", "team-a", "--", "train.py",
    ),
    "k8s_coscheduling.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "3",
        "--gang", "coscheduling", "--", "train.py",
    ),
    "k8s_koordinator.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--gang", "koordinator", "--backoff-limit", "20", "--", "train.py",
    ),
    "k8s_native.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "3", "--gang", "native",
        "--k8s-version", "1.37", "--", "train.py",
    ),
    "k8s_old.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--k8s-version", "v1.29.3", "--", "train.py",
    ),
    "k8s_etcd.yaml": (
        "k8s", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--master-store", "etcd://etcd:2379", "--module", "--", "pkg.train", "--", "x",
    ),
    "jobset.yaml": (
        "jobset", "--name", "tr", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--nproc-per-node", "2", "--ttl", "600", "--suspend", "--rbac", "--gang", "kueue",
        "--queue", "team-a", *_SCRIPT,
    ),
    "trainer_runtime.yaml": (
        "trainer-runtime", "--name", "elasticrun", "--image", "repo/train:1.0", "--nnodes", "2:4",
        "--nproc-per-node", "2", "--token-secret", "token", "--gang", "volcano", *_SCRIPT,
    ),
    "slurm_least.sh": ("slurm", "--name", "tr", "--", "train.py"),
    "slurm_full.sh": (
        "slurm", "--name", "tr", "--nnodes", "2:4", "--spares", "1", "--nproc-per-node", "8",
        "--partition", "gpu,big", "--account", "lab", "--qos", "high", "--time", "1-04:00:00",
        "--gpus-per-node", "h100:8", "--cpus-per-task", "96", "--mem", "900G", "--exclusive",
        "--output", "logs/%x-%j.out", "--working-dir", "/home/me", "--requeue", "5",
        "--signal", "USR1@300", "--sbatch", "constraint=[a|b]", "--sbatch=--exclude=n[1-4]",
        "--env", "NCCL_DEBUG=INFO", "--env", "NOTE=it's",
        "--token-file", "/home/me/job token", *_LAUNCHER, *_SCRIPT,
    ),
    "slurm_array.sh": (
        "slurm", "--name", "sweep", "--nnodes", "2", "--array", "0-7%2", "--cpus-per-task", "4",
        "--", "sweep.py",  # reads SLURM_ARRAY_TASK_ID
    ),
    "slurm_etcd.sh": (
        "slurm", "--name", "tr", "--nnodes", "2:3", "--master-store", "etcd://e0:2379,e1:2379",
        "--exclusive", "--", "train.py",
    ),
}  # fmt: skip
