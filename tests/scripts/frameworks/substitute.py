"""Runs another project's launcher, with `elasticrun.run` in the place of torch's when told so.

    python substitute.py torchrun|elasticrun accelerate SCRIPT
    python substitute.py torchrun|elasticrun fabric PORT SCRIPT

Both projects import `torch.distributed.run` inside a function and call it from Python: accelerate
its parser and `run(args)`, Lightning's Fabric `main([...])`.
"""

from __future__ import annotations

import sys


def put_in_place() -> None:
    """Make `import torch.distributed.run` give our module, both ways of looking it up."""
    import torch.distributed

    import elasticrun.run

    sys.modules["torch.distributed.run"] = elasticrun.run
    torch.distributed.run = elasticrun.run


def accelerate(script: str) -> None:
    """The launcher that accelerate uses for several processes on one host."""
    from accelerate.commands import launch

    words = ["--num_processes=2", "--num_machines=1", "--multi_gpu", "--mixed_precision=no",
             "--dynamo_backend=no", "--main_process_port=0", "--num_cpu_threads_per_process=1",
             script]  # fmt: skip
    args = launch.launch_command_parser().parse_args(words)
    args.use_cpu = True
    launch.multi_gpu_launcher(args)


def fabric(port: str, script: str) -> None:
    """`fabric run`, with the words its command line would have parsed."""
    from lightning.fabric import cli

    words = ["run", "--accelerator=cpu", "--devices=2", "--strategy=ddp", f"--main-port={port}",
             script]  # fmt: skip
    cli._main(words, standalone_mode=False)


if __name__ == "__main__":
    launcher, project, *rest = sys.argv[1:]
    if launcher == "elasticrun":
        put_in_place()
    {"accelerate": accelerate, "fabric": fabric}[project](*rest)
