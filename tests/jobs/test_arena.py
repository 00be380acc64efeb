"""Arena's words in the place of ours (a whole command is a case of tests/jobs/render/goldens)."""

from __future__ import annotations

import pytest

from elasticrun.cli.settings import UsageError
from elasticrun.jobs.manage.arena import ROWS, translate
from elasticrun.jobs.render.checks import Invalid


def ours(where: str, *words: str) -> list[str]:
    return translate(words, where, lambda note: None)


@pytest.mark.parametrize(
    ("where", "words", "wanted"),
    [
        ("k8s", "--workers 2 --gpus=8 --name x", "--nodes=2 --gpus=8 --name x"),
        ("slurm", "--workers=2 --gpus 8", "--nodes=2 --gpus-per-node=8"),
        ("slurm", "--cpu=4 --memory=10Gi", "--cpus-per-task=4 --mem=10G"),
        ("local", "--gpus=8", "--nproc-per-node=8"),
        ("local", "--gpus=8 --nproc_per_node=4", "--nproc_per_node=4"),
        ("local", "--gpus=0", ""),
        ("k8s", "--gang --rdma --name x", "--gang=coscheduling --rdma=rdma/hca --name x"),
        ("k8s", "--gang volcano --rdma a/b", "--gang=volcano --rdma=a/b"),
        ("k8s", "--gang=false --rdma=true", "--rdma=rdma/hca"),
        ("k8s", "--device amd.com/gpu=2", "--gpu-resource=amd.com/gpu --gpus=2"),
        ("k8s", "--running_timeout=1h30m", "--deadline=5400"),
        ("slurm", "--running-timeout=90s --ttl-after-finished=1d", "--time=2"),
        ("k8s", "--ttl-after-finished=1d", "--ttl=86400"),
        ("k8s", "-e A=1 -n team -l a=b", "--env=A=1 --namespace=team --label=a=b"),
        ("k8s", "--data a:/a --x --data=b:/b", "--data=a:/a --x --data=b:/b"),
        ("k8s", "--data-dir /d --data-dir /e", "--volume=dir0=host:/d:/d --volume=dir1=host:/e:/e"),
        ("local", "--data-dir /d --data-dir /e", "--data=dir0:/d --data=dir1:/e"),
        ("k8s", "--tensorboard=true --host-network false x", "--tensorboard x"),
        ("local", "--tensorboard x --tensorboard=false", "--tensorboard x"),
        ("k8s", "--data-dir /d:/e", "--volume=dir0=host:/d:/e"),
        ("local", "--data-dir /d:/d", "--data=dir0:/d"),
        ("ssh", "--env GIT_SYNC_BRANCH=dev --sync-source=u", "--git=u@dev"),
        ("k8s", "--env GIT_SYNC_REV=v1 -e GIT_SYNC_BRANCH=dev --git u", "--git=u@v1"),
        ("k8s", "--env GIT_SYNC_BRANCH=dev", "--env=GIT_SYNC_BRANCH=dev"),
        ("k8s", "--sync-source=u", "--git=u --working-dir=/root"),
        ("k8s", "--sync-source=u --workingDir /w", "--working-dir=/w --git=u"),
        (
            "k8s",
            "-d a:/a -p high --hostNetwork --toleration=all",
            "--data=a:/a --priority=high --host-network --toleration=all",
        ),
        ("k8s", "--loglevel debug --shell=sh --x", "--x"),
        ("k8s", "--max-restarts=3 -- train.py --gpus 3", "--max-restarts=3 -- train.py --gpus 3"),
        ("k8s", "--x -- python train.py --y", "--x -- train.py --y"),
        ("k8s", "-- torchrun --nnodes=2 --tee=3 train.py", "--tee=3 -- train.py"),
        ("k8s", "--no-python -- python train.py", "--no-python -- python train.py"),
    ],
)
def test_flags(where: str, words: str, wanted: str) -> None:
    assert ours(where, *words.split()) == wanted.split()


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("python -u train.py --lr 1", ["--", "train.py", "--lr", "1"]),
        ("/usr/bin/python3.11 -m pkg.train -u", ["--module", "--", "pkg.train", "-u"]),
        ("torchrun --nnodes=2 --node_rank 1 --nproc_per_node=4 --tee 3 t.py -x",
         ["--nproc_per_node=4", "--tee", "3", "--", "t.py", "-x"]),
        ("python -u -m torch.distributed.run --nnodes 2 --tee=3 -m pkg.t",
         ["--tee=3", "-m", "--", "pkg.t"]),
        ("dlrover-run --network-check t.py", ["--network-check", "--", "t.py"]),
        ("bash run.sh", ["--no-python", "--", "bash", "run.sh"]),
        ("cd /x && python t.py", ["--no-python", "--", "sh", "-c", "cd /x && python t.py"]),
        ("python -s t.py", ["--no-python", "--", "python", "-s", "t.py"]),
        ("python -c 'print(1)'", ["--no-python", "--", "python", "-c", "print(1)"]),
        ("python 'a b.py'", ["--", "a b.py"]),
    ],
)  # fmt: skip
def test_a_command_in_one_string(command: str, wanted: list[str]) -> None:
    assert ours("k8s", "pytorch", "--name=x", command) == ["--name=x", *wanted]
    assert ours("k8s", "--on", "k8s", "pytorch", command) == ["--on", "k8s", *wanted]
    assert ours("k8s", "--name", "py", "pytorchjob", command) == ["--name", "py", *wanted]


@pytest.mark.parametrize(
    ("where", "words", "part"),
    [
        ("k8s", ["--sync-mode=rsync"], "code comes from git"),
        (
            "k8s",
            ["--config-file", "a.yaml:/etc/b.yaml"],
            "NAME --from-file=b.yaml=a.yaml`, and here --volume NAME=configmap:NAME:/etc",
        ),
        ("k8s", ["--running-timeout=soon"], "is not a time"),
        ("k8s", ["--device=gpu"], "is not KEY=N"),
        ("k8s", ["--sync-mode", "git"], "needs --sync-source=URL"),
        ("local", ["--config-file", "a:/b"], "--config-file is only for pods .submit"),
        ("local", ["--data-dir=/a:/b"], "nothing is mounted here; the folder stays /a"),
        ("k8s", ["--workers"], "--workers needs a value"),
        ("local", ["--image=x"], r"--image is only for pods .*: leave it out here"),
        ("ssh", ["--cpu=1"], r"--cpu is only for pods .* and Slurm jobs"),
        ("k8s", ["python 'x"], "cannot be read"),
        ("k8s", ["cd /x && torchrun t.py"], "each rank would start its own launcher"),
        ("k8s", ["bash -c 'torchrun t.py'"], "use --working-dir instead of cd"),
        (
            "k8s",
            ["tfjob", "--workers=2"],
            "tfjob: elasticrun runs only Arena jobs of the kind pytorch",
        ),
        ("local", ["--workers=-1"], "--workers=-1: the smallest number"),
    ],
)
def test_what_cannot_be_taken_over(where: str, words: list[str], part: str) -> None:
    with pytest.raises((Invalid, UsageError), match=part):
        ours(where, *words)


def test_what_has_no_effect_is_said() -> None:
    said: list[str] = []
    for name, row in ROWS.items():
        if row.note:
            translate([f"{name}=x"], "local", said.append)
    assert len(said) >= 10
    assert all(" has no effect: " in note for note in said)
