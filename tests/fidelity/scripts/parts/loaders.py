"""The same with workers that are forked and spawned."""

from parts import ddp


def run(name):
    workers = {"num_workers": 2, "worker_init_fn": ddp.seed_worker}
    for kind in ("fork", "spawn"):
        ddp.LOADERS[kind] = {**workers, "multiprocessing_context": kind}
    ddp.run(name)
