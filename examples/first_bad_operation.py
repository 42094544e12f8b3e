"""Find the operation that made the first NaN: examine one forward and backward, operation by operation.

python examples/first_bad_operation.py
"""

from __future__ import annotations

import torch
from torch import nn

from wandb_gradwatch import find_nonfinite, trace_nonfinite


class Gate(nn.Module):
    """Weights channels by the logarithm of their mean activity, which is log(0) for a channel that is never active."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activity = torch.relu(self.linear(x)).mean(dim=0)
        return x * activity.log()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Gate(16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(4, 8), torch.randn(4, 1)

    def loss_function(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, targets)

    print("Run the batch again, without changing the model or its gradients:\n")
    print(find_nonfinite(model, inputs, loss_function))

    print("\nOr trace a training step while it runs:\n")
    with trace_nonfinite(model) as trace:
        optimizer.zero_grad()
        loss_function(model(inputs)).backward()
        optimizer.step()
    if trace.finding is not None:
        print(
            f"{trace.finding.operation} in {trace.finding.module!r}, line {trace.finding.line} of {trace.finding.file}"
        )


if __name__ == "__main__":
    main()
