"""Lightning's Trainer with its own strategy and its own seeding."""

import tempfile

import lightning
import torch
import witness

from parts.model import make


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make()

    def training_step(self, batch, number):
        loss = self.model(batch + torch.rand(8)).pow(2).mean()
        witness.loss(loss, "training")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def run(name):
    lightning.seed_everything(9)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(128.0).reshape(16, 8), 4))
    witness.weights(module, name)
