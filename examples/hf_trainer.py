"""Hugging Face Trainer with one callback, which measures accumulated gradients before and after clipping.

python examples/hf_trainer.py
"""

import os
import tempfile

import torch
import wandb
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from wandb_gradwatch.integrations.transformers import GradWatchCallback

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_PROJECT", "gradwatch-examples")


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.net(x)
        return {"loss": nn.functional.mse_loss(prediction, labels), "logits": prediction}


def main() -> None:
    torch.manual_seed(0)
    steps = int(os.environ.get("STEPS", "200"))
    rows = torch.randn(1024, 8)
    data = [{"x": x, "labels": x.sin().sum(dim=0, keepdim=True)} for x in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            report_to=["wandb"],
            run_name="hf-trainer",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=Regression(),
            args=arguments,
            train_dataset=data,
            callbacks=[GradWatchCallback(sample_every=1)],  # the one line; sample every step of so short a training
        )
        trainer.train()
    norms = [entry["gradwatch/grad_norm"] for entry in trainer.state.log_history if "gradwatch/grad_norm" in entry]
    print(f"gradient norm before clipping, from {norms[0]:.3f} to {norms[-1]:.3f}")
    wandb.finish()


if __name__ == "__main__":
    main()
