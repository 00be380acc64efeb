"""HF Trainer with a tiny GPT-2 of random weights."""

import tempfile

import torch
import witness
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,))
        return {"input_ids": ids, "labels": ids}


class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        for key in logs.keys() & {"loss", "grad_norm"}:
            witness.loss(logs[key], key)


def run(name):
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    witness.generators(f"{name}: model", *witness.ALL)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        per_device_train_batch_size=2,
        disable_tqdm=True,
        dataloader_num_workers=1,
    )
    Trainer(model, arguments, train_dataset=Noise(), callbacks=[Tell()]).train()
    witness.weights(model, name)
