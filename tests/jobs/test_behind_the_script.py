"""What stands behind the script is the script's: no flag of ours is looked for there, not even by
its first letters, and every word is handed on as it is."""

from __future__ import annotations

from typing import Final

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.place import srun_command
from elasticrun.cli.table import FLAGS, NEWER, TORCHRUN
from elasticrun.jobs.verbs import render
from elasticrun.jobs.verbs.render import split_at_dashes
from elasticrun.jobs.verbs.render_flags import parser as render_parser

MEGATRON: Final = """
    --save --save-interval --save-retain-interval --load --no-save-optim --no-save-rng --no-load-rng
    --train-iters --train-samples --log-interval --log-throughput --log-params-norm --log-progress
    --log-num-zeros-in-grad --log-straggler --exit-interval --exit-duration-in-mins
    --exit-signal-handler --exit-on-missing-checkpoint --tensorboard-dir --micro-batch-size
    --global-batch-size --rampup-batch-size --num-layers --num-attention-heads --num-workers
    --normalization --norm-epsilon --nccl-communicator-config-path --tensor-model-parallel-size
    --tokenizer-type --tokenizer-model --seq-length --lr --lr-decay-style --min-lr --mock-data
    --distributed-backend --distributed-timeout-minutes --recompute-activations --rotary-percent
    --auto-detect-ckpt-format --async-save --attention-dropout --standalone-embedding-stage
    --straggler-minmax-count --timing-log-level --transformer-impl --use-distributed-optimizer
    --untie-embeddings-and-output-weights --role-based --data-path --ckpt-format --eval-iters
"""
TORCHTITAN: Final = """
    --job.config_file --job.dump_folder --model.flavor --training.steps --training.local_batch_size
    --metrics.log_freq --metrics.enable_tensorboard --parallelism.tensor_parallel_degree
    --checkpoint.enable --checkpoint.interval --lr_scheduler.warmup_steps --debug.seed
    --comm.init_timeout_seconds --comm.train_timeout_seconds --fault_tolerance.enable --module
    --config --validation.enable --activation_checkpoint.mode --profiling.enable_profiling
"""
NANOGPT: Final = """
    config/train_gpt2.py --eval_only --eval_interval --eval_iters --log_interval --init_from
    --always_save_checkpoint --wandb_log --dataset --batch_size=32 --compile=False --device=cpu
    --dtype=float32 --out_dir=out --n_layer --block_size --gradient_accumulation_steps --backend
"""
TRAINING_ARGUMENTS: Final = """
    --output_dir --do_train --do_eval --per_device_train_batch_size --num_train_epochs --max_steps
    --learning_rate --lr_scheduler_type --warmup_steps --optim --gradient_accumulation_steps
    --average_tokens_across_devices --max_grad_norm --bf16 --torch_compile --auto_find_batch_size
    --logging_strategy --logging_steps --logging_first_step --log_on_each_node --log_level
    --log_level_replica --disable_tqdm --report_to --run_name --project --eval_strategy --eval_steps
    --save_strategy --save_steps --save_on_each_node --save_total_limit --save_only_model
    --enable_jit_checkpoint --push_to_hub --hub_token --load_best_model_at_end --ignore_data_skip
    --restore_callback_states_from_checkpoint --full_determinism --seed --use_cpu --train_file
    --accelerator_config --parallelism_config --dataloader_num_workers --remove_unused_columns
    --label_names --length_column_name --ddp_backend --ddp_timeout --fsdp --fsdp_config --deepspeed
    --resume_from_checkpoint --local_rank --no_cuda --tokenizer_name --token --trust_remote_code
"""
ACCELERATE: Final = """
    --config_file --cpu --multi_gpu --num_processes --num_machines --machine_rank --main_process_ip
    --main_process_port --mixed_precision --module --no_python --max_restarts --monitor_interval
    --rdzv_backend --rdzv_conf --role --tee --log_dir --same_network --quiet --dynamo_backend --env
    --debug --with_tracking --checkpointing_steps --use_fsdp --use_deepspeed --gpu_ids -m -q -t -h
"""
OTHERS: Final = {
    "Megatron-LM": MEGATRON,
    "torchtitan": TORCHTITAN,
    "nanoGPT": NANOGPT,
    "the Trainer's arguments": TRAINING_ARGUMENTS,
    "accelerate": ACCELERATE,
}

SPELLINGS: Final = [spelling for flag in FLAGS for spelling in flag.spellings] + ["--help", "-h"]
OURS: Final = sorted({name[:end] for name in SPELLINGS for end in range(1, len(name) + 1)})

BEFORE: Final = {
    "a script": (),
    "a module": ("-m",),
    "a program": ("--no-python",),
    "flags with values": ("--nnodes", "1:4", "-r3", "--tee", "0:1", "--max-rest", "2", "-mt", "3"),
    "a negative number": ("--node-rank", "-1", "--standalone"),
}


def script_words() -> list[str]:
    """Every beginning of every flag of ours, alone and with a value, and other programs' flags."""
    others = [word for text in OTHERS.values() for word in text.split()]
    odd = [
        "",
        " ",
        "-",
        "--",
        "a b",
        "--x y",
        "-1",
        "=",
        "--=",
        "\udcff",
        "${local_rank}",
        "--save=",
    ]
    return [*OURS, *(f"{word}=1" for word in OURS), *others, *odd]


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE.values(), ids=list(BEFORE))
def test_every_word_behind_the_script_is_handed_on(before: tuple[str, ...]) -> None:
    parser = get_args_parser({})
    bare = vars(parser.parse_args([*before, "train"]))
    for word in script_words():
        for words in ([word], ["first", word, "v"]) if not before else ([word, "v"],):
            found = vars(parser.parse_args([*before, "train", *words]))
            # torchrun, too, takes a `--` right behind the script for the end of its own flags
            expected = words[1:] if words[0] == "--" else words
            assert found == bare | {"training_script_args": expected}, words


def test_all_of_them_together() -> None:
    words = script_words()
    found = get_args_parser({}).parse_args(["--standalone", "train.py", *words])
    assert found.training_script_args == words
    assert (found.training_script, found.given) == ("train.py", {"standalone": "--standalone"})


def test_behind_the_dashes_of_render() -> None:
    """The verb, and the nodes that read what it has printed."""
    written = [word for word in script_words() if word != "\udcff"]  # no text, so in no manifest
    for program in (["train.py", *written], ["train.py", "--save", "x"], ["a b", "--log"]):
        flags, rest = split_at_dashes(["--name=x", "--image=y:1", "--", *program])
        ns, extra = render_parser("k8s").parse_known_args(flags)
        assert extra == []
        read, _ = render.read_launch(ns, rest, gpus=0, signal="TERM")
        assert (read.script, list(read.args)) == (program[0], program[1:])


def test_srun_hands_them_on() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    for rest in (["--srun", "--dry-run", "--log"], ["--", "--srun"], ["--save", "--srun"]):
        words = ["--srun", "--nnodes", "2", "--", "--dry-run", *rest]
        command = srun_command(words, environ, interactive=False)
        assert command[command.index("elasticrun") + 1 :] == words[1:]


def test_only_torchruns_flags_are_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest name is said for what was meant; torchrun's own are in tests/compat."""
    parser = get_args_parser({})
    names = [
        spelling
        for flag in FLAGS
        if flag.origin not in (TORCHRUN, NEWER)
        for spelling in flag.spellings
    ]
    torchruns = [
        one for flag in FLAGS if flag.origin in (TORCHRUN, NEWER) for one in flag.spellings
    ]
    for name in names:
        for end in range(3, len(name)):
            if name[:end] in names or any(one.startswith(name[:end]) for one in torchruns):
                continue
            with pytest.raises(SystemExit):
                parser.parse_args([name[:end], "train.py"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--save-at", "train.py"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "there is no flag --save-at; did you mean --save-at-breakpoint?" in said
