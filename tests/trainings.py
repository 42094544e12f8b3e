"""Small real trainings, healthy and faulty, for the tests of the judgement. Each function returns a Training."""

from __future__ import annotations

import torch
from grad_samples import Training
from torch import nn
from torch.nn import functional

CORPUS = (
    "A gradient is a direction and a length. When its length grows from step to step the training will break; "
    "when it fades from layer to layer the first layers learn nothing. Watch both, and say so early. "
)


def _regression(dim: int = 10, batch: int = 64, *, seed: int = 0, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(dim, 1, generator=generator)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(batch, dim, generator=generator)
        return scale * functional.mse_loss(
            model(x), torch.tanh(x @ target) + 0.1 * torch.randn(batch, 1, generator=generator)
        )

    return loss


def mlp_stack(depth: int, *, dim: int = 10, width: int = 32, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return an MLP with `depth` hidden layers and a head of one output."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(dim if index == 0 else width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def mlp(seed: int = 0, *, lr: float = 1e-2, optimizer: type = torch.optim.Adam, scale: float = 1.0) -> Training:
    torch.manual_seed(seed)
    model = mlp_stack(2)
    return Training(model, optimizer(model.parameters(), lr=lr), _regression(seed=seed, scale=scale))


def summed_loss(seed: int = 0) -> Training:
    """A loss that is summed over half a million elements, not averaged: healthy norms are far above 100."""
    return mlp(seed, scale=5e5)


def toy_curve(seed: int = 0) -> Training:
    """A first tutorial's network: one input, ReLU, and all data in every batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.linspace(-1, 1, 64)[:, None]
    return Training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.03),
        lambda model, step: functional.mse_loss(model(x), torch.sin(3 * x)),
    )


def conv_net(seed: int = 0, *, batch: int = 32, lr: float = 0.05) -> Training:
    """Classify images with horizontal, vertical or no stripes, with batch norm, momentum and cross-entropy."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        labels = torch.randint(0, 3, (batch,), generator=generator)
        images = torch.randn(batch, 1, 12, 12, generator=generator)
        images[labels == 1, :, ::3] += 1.0
        images[labels == 2, :, :, ::3] += 1.0
        return functional.cross_entropy(model(images), labels)

    return Training(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), loss)


class CharModel(nn.Module):
    """A small character transformer, with the key bias and the embeddings of a real one."""

    def __init__(self, vocabulary: int, *, dim: int = 32, length: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def _text_loss(seed: int, *, batch: int = 16, length: int = 32):
    generator = torch.Generator().manual_seed(seed)
    letters = sorted(set(CORPUS))
    text = torch.tensor([letters.index(letter) for letter in CORPUS * 4])

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        starts = torch.randint(0, len(text) - length - 1, (batch,), generator=generator)
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    return loss, len(letters)


def char_transformer(seed: int = 0, *, lr: float = 3e-3) -> Training:
    torch.manual_seed(seed)
    loss, vocabulary = _text_loss(seed)
    model = CharModel(vocabulary)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=lr), loss)


class LoRALinear(nn.Module):
    """A frozen layer with a trainable low-rank update whose B is initialised to zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def lora(seed: int = 0) -> Training:
    """Fine-tuning with LoRA, where only the adapters are trained and sampled."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        LoRALinear(nn.Linear(10, 32)), nn.ReLU(), LoRALinear(nn.Linear(32, 32)), nn.ReLU(), LoRALinear(nn.Linear(32, 1))
    )
    adapters = nn.ModuleDict(
        {f"{i}_{part}": getattr(model[i], part) for i in (0, 2, 4) for part in ("lora_A", "lora_B")}
    )
    regression = _regression(seed=seed)
    return Training(
        adapters, torch.optim.AdamW(adapters.parameters(), lr=1e-2), lambda _, step: regression(model, step)
    )


def lstm(seed: int = 0) -> Training:
    """An LSTM on text."""
    torch.manual_seed(seed)
    loss, vocabulary = _text_loss(seed)
    model = RecurrentModel(vocabulary, kind=nn.LSTM)
    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss)


class RecurrentModel(nn.Module):
    def __init__(self, vocabulary: int, *, kind: type[nn.Module], dim: int = 32, **options: object) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.rnn = kind(dim, dim, batch_first=True, **options)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.tokens(tokens))[0])


def sigmoid_stack(seed: int = 0, *, depth: int = 8) -> Training:
    torch.manual_seed(seed)
    model = mlp_stack(depth, activation=nn.Sigmoid)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), _regression(seed=seed))


def unclipped_rnn(seed: int = 0, *, lr: float = 2.0) -> Training:
    """A ReLU RNN over 32 time steps with plain SGD and without clipping."""
    torch.manual_seed(seed)
    loss, vocabulary = _text_loss(seed)
    model = RecurrentModel(vocabulary, kind=nn.RNN, nonlinearity="relu")
    with torch.no_grad():  # a gain above 1, which training can reach
        model.rnn.weight_hh_l0.copy_(1.3 * torch.nn.init.orthogonal_(torch.empty(32, 32)))
    return Training(model, torch.optim.SGD(model.parameters(), lr=lr), loss)


def wild_mlp(seed: int = 0) -> Training:
    """Adam with 100 times the learning rate that suits it."""
    return mlp(seed, lr=1.0)


def wild_sgd(seed: int = 0) -> Training:
    return mlp(seed, lr=5.0, optimizer=torch.optim.SGD)


def wild_transformer(seed: int = 0) -> Training:
    return char_transformer(seed, lr=0.3)


def tiny_loss_fp16(seed: int = 0, *, scale: float = 1e-6) -> Training:
    """Gradients that underflow in float16, because the loss is too small."""
    torch.manual_seed(seed)
    model = mlp_stack(2)

    def through_half(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.half().float()

    return Training(
        model, torch.optim.Adam(model.parameters(), lr=1e-3), _regression(seed=seed, scale=scale), through_half
    )


def dead_relus(seed: int = 0, *, layer: int = 2, bias: float = -20.0) -> Training:
    torch.manual_seed(seed)
    model = mlp_stack(3)
    nn.init.constant_(model[layer].bias, bias)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _regression(seed=seed))


def frozen_layer(seed: int = 0) -> Training:
    """A layer that is frozen on purpose."""
    torch.manual_seed(seed)
    model = mlp_stack(2)
    model[2].requires_grad_(False)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _regression(seed=seed))


def detached_layer(seed: int = 0) -> Training:
    """A trainable layer that is detached from the loss."""
    torch.manual_seed(seed)
    model = mlp_stack(2)
    layer = model[2]
    layer.forward = lambda x: functional.linear(x, layer.weight.detach(), layer.bias.detach())
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _regression(seed=seed))


def large_initialisation(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = mlp_stack(4, width=64)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), _regression(seed=seed))


def small_initialisation(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = mlp_stack(4, width=64)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1e-4)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), _regression(seed=seed))


def batch_norm_of_two(seed: int = 0, *, batch: int = 2) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(10, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), _regression(seed=seed, batch=batch))


def poisoned_batch(seed: int = 0, *, at: int = 60, factor: float = 1e3) -> Training:
    """One batch whose loss is multiplied by `factor`."""
    torch.manual_seed(seed)
    training = mlp(seed)
    clean = training.loss
    training.loss = lambda model, step: clean(model, step) * (factor if step == at else 1.0)
    return training


def rate_jumps(seed: int = 0, *, at: int = 60, factor: float = 100) -> Training:
    """From step `at` on the learning rate is `factor` times higher."""
    training = mlp(seed, lr=1e-3)
    clean = training.loss

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-3 * (factor if step >= at else 1.0)
        return clean(model, step)

    training.loss = loss
    return training


def zeroed_before_step(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    training = mlp(seed)
    training.change_gradients = lambda model, step: model.zero_grad(set_to_none=False)
    return training


def growing_depth(seed: int = 0) -> Training:
    """A deep linear stack whose layers each triple the signal: gradients explode through depth at the first step."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)), nn.Linear(32, 1))
    with torch.no_grad():
        for module in list(model)[:-1]:
            module.bias.zero_()
            module.weight.copy_(3.0 * nn.init.orthogonal_(torch.empty(32, 32)))
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-12), _regression(dim=32, seed=seed))


def invalid_operation(seed: int = 0, *, at: int = 40) -> Training:
    """A square root of exactly 0 inside the network, in one batch: its derivative is Inf, and Inf times 0 is NaN."""
    torch.manual_seed(seed)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above, self.poisoned = nn.Linear(10, 32), nn.Linear(32, 1), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.below(x) ** 2
            return self.above(torch.sqrt(hidden * 0 if self.poisoned else hidden + 1e-3))

    model = Root()
    regression = _regression(seed=seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.poisoned = step == at
        return regression(model, step)

    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss)
