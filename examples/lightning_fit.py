"""Lightning with one callback, which logs the norm to every logger and the statistics of every layer to W&B.

    python examples/lightning_fit.py

`train/grad_norm` is logged with the step that it belongs to. EarlyStopping and ModelCheckpoint can monitor
`train_epoch/grad_norm`, the mean over the steps of an epoch.
"""

import os

import lightning.pytorch as pl
import torch
import wandb
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn

from wandb_gradwatch.integrations.lightning import GradWatchCallback

os.environ.setdefault("WANDB_MODE", "offline")


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(0)
    steps = int(os.environ.get("STEPS", "200"))
    x = torch.randn(16 * 20, 8)
    data = torch.utils.data.TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        logger=WandbLogger(project="gradwatch-examples", name="lightning"),
        callbacks=[
            GradWatchCallback(sample_every=1),  # the one line; sample every step of so short a training
            EarlyStopping("train_epoch/grad_norm", patience=100, check_on_train_epoch_end=True),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
    print(f"mean gradient norm of the last epoch {trainer.callback_metrics['train_epoch/grad_norm']:.3f}")
    wandb.finish()


if __name__ == "__main__":
    main()
