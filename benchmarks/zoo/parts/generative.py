"""Models that draw samples: autoencoders, flows, diffusion and energies."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop, supervised
from . import data
from .dense import Residual, mlp


class VAE(nn.Module):
    """Encoder, a normal code, decoder; with `codes` a vector-quantised code, its gradient passed straight through."""

    def __init__(self, dim: int = 16, latent: int = 4, *, codes: int = 0, beta: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(dim, 32, latent if codes else 2 * latent), mlp(latent, 32, dim)
        self.codes = nn.Embedding(codes, latent) if codes else None
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        h = self.encoder(x)
        if self.codes is not None:
            code = self.codes(torch.cdist(h, self.codes.weight).argmin(dim=1))
            rest = functional.mse_loss(code, h.detach()) + 0.25 * functional.mse_loss(h, code.detach())
            return functional.mse_loss(self.decoder(h + (code - h).detach()), x) + rest
        mean, log_var = h.chunk(2, dim=1)
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(dim=1).mean()
        return (
            functional.mse_loss(self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), x) + self.beta * kl
        )


class Coupling(nn.Module):
    """A normalising flow of affine couplings; forward returns the negative log likelihood."""

    def __init__(self, dim: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(dim // 2, 24, dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = net(kept).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x, log_det = torch.cat([moved * scale.exp() + shift, kept], dim=1), log_det + scale.sum(dim=1)
        return (0.5 * x.square().sum(dim=1) - log_det).mean()


class Diffusion(nn.Module):
    """Predicts the noise that was added; forward returns the loss."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        self.net = mlp(dim + 2, 64, 64, dim, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        angle = 0.5 * torch.pi * t
        seen = torch.cat([angle.cos() * x + angle.sin() * noise, angle.cos(), angle.sin()], dim=1)
        return functional.mse_loss(self.net(seen), noise)


def rebuild(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return functional.mse_loss(model(x + 0.3 * torch.randn_like(x)), x)


def beta_warmed(loop: Loop, step: int) -> None:
    """The weight of the KL term rises from 0."""
    loop.model.beta = 0.3 * min(step / 100, 1.0)


def annealed() -> Loop:
    """An autoencoder whose codes are drawn, ever more sharply."""
    model, heat = nn.ModuleDict({"encoder": mlp(12, 32, 16), "decoder": mlp(16, 32, 12)}), [2.0]

    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        code = functional.gumbel_softmax(model["encoder"](x), tau=heat[0])
        return functional.mse_loss(model["decoder"](code), x)

    cool = lambda loop, step: heat.__setitem__(0, max(0.3, 2.0 * 0.99**step))  # noqa: E731
    return supervised(model, data.blobs(), loss, lr=3e-3, before=[cool])


class Denoiser(nn.Module):
    """A U-Net that is told how much noise there is."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.time = mlp(1, 16, width, act=nn.SiLU)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Residual(
            nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1))
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        fine = functional.silu(self.first(x) + self.time(level[:, None])[:, :, None, None])
        return self.out(
            torch.cat([fine, functional.silu(self.up(self.middle(functional.silu(self.down(fine)))))], dim=1)
        )


class Coupled(nn.Module):
    """RealNVP: half of the numbers say how the other half is moved and stretched."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(1, 24, 24, 2) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x))
        for layer in self.layers:
            kept, moved = x.chunk(2, dim=1)
            stretch, shift = layer(kept).chunk(2, dim=1)
            stretch = 2 * torch.tanh(stretch / 2)
            x, total = torch.cat([moved * stretch.exp() + shift, kept], dim=1), total + stretch.sum(dim=1)
        return x, total


def denoised_images(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    level, noise = torch.rand(len(x)), torch.randn_like(x)
    angle = (level * torch.pi / 2)[:, None, None, None]
    return functional.mse_loss(model(angle.cos() * x + angle.sin() * noise, level), noise)


def bits(size: int = 256) -> data.Batches:
    """Six patterns of 24 bits, a tenth of them flipped."""
    patterns = torch.rand(6, 24) < 0.5
    return lambda _: ((patterns[torch.randint(0, 6, (size,))] ^ (torch.rand(size, 24) < 0.1)).float(),)


def bounded(model: nn.Module, x: Tensor) -> Tensor:
    """The evidence's lower bound."""
    mean, log_var = model["encoder"](x).chunk(2, dim=1)
    out = model["decoder"](mean + torch.randn_like(mean) * (0.5 * log_var).exp())
    own = functional.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x)
    return own + 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(dim=1).mean()


@data.anew
def moons(size: int = 256) -> Batch:
    angle, side = torch.pi * torch.rand(size), torch.randint(0, 2, (size,)) * 2.0 - 1
    x = torch.stack([side * angle.cos() + 0.5 * side, side * angle.sin() - 0.25 * side], dim=1)
    return (x + 0.1 * torch.randn(size, 2),)


def likely(model: nn.Module, x: Tensor) -> Tensor:
    z, stretched = model(x)
    return (0.5 * z.square().sum(dim=1) - stretched).mean()


def straightened(model: nn.Module, x: Tensor) -> Tensor:
    """Flow matching: the velocity along a straight way from noise to data."""
    noise, time = torch.randn_like(x), torch.rand(len(x), 1)
    return functional.mse_loss(model(torch.cat([time * x + (1 - time) * noise, time], dim=1)), x - noise)


class Bits(nn.Module):
    """A restricted Boltzmann machine: `energy` of what is seen, `drawn` after some steps of Gibbs' sampling."""

    def __init__(self, seen: int = 24, hidden: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(hidden, seen))
        self.seen, self.hidden = nn.Parameter(torch.zeros(seen)), nn.Parameter(torch.zeros(hidden))

    def softplus(self, x: Tensor) -> Tensor:
        return functional.softplus(x)

    def energy(self, x: Tensor) -> Tensor:
        return -x @ self.seen - self.softplus(x @ self.weight.mT + self.hidden).sum(dim=1)

    @torch.no_grad()
    def drawn(self, x: Tensor) -> Tensor:
        for _ in range(2):
            hidden = torch.bernoulli(torch.sigmoid(x @ self.weight.mT + self.hidden).nan_to_num())
            x = torch.bernoulli(torch.sigmoid(hidden @ self.weight + self.seen).nan_to_num())
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.energy(x) - self.energy(self.drawn(x))).mean()


def patterns(size: int = 64) -> data.Batches:
    """Four patterns of 24 bits, a twentieth of them flipped."""
    known = torch.rand(4, 24) < 0.4
    return lambda _: ((known[torch.randint(0, 4, (size,))] ^ (torch.rand(size, 24) < 0.05)).float(),)


def walked(model: nn.Module, x: Tensor) -> Tensor:
    """An energy that is low at the data; its samples walk downhill from noise."""
    at = torch.randn_like(x).requires_grad_(True)
    for _ in range(8):
        slope = torch.autograd.grad(model(at).sum(), at)[0]
        at = (at - 0.1 * slope.clamp(-5, 5) + 0.1 * torch.randn_like(at)).detach().requires_grad_(True)
    low, high = model(x), model(at.detach())
    return low.mean() - high.mean() + 0.1 * (low.square() + high.square()).mean()


def preconditioned(model: nn.Module, x: Tensor, weight: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Noise from very little to far more than the data; what the network must say has size 1 at each level."""
    sigma = torch.exp(1.2 * torch.randn(len(x), 1) - 0.5)
    total = (sigma**2 + 1).sqrt()
    noisy = x + sigma * torch.randn_like(x)
    said = model(torch.cat([noisy / total, sigma.log() / 4], dim=1))
    out = noisy / total**2 + sigma / total * said
    factor = total**2 / sigma**2 if weight is None else weight(sigma)
    return (factor * (out - x).square()).mean()


def transport(model: nn.Module, noise: Tensor, real: Tensor, blur: float = 0.1) -> Tensor:
    """How far points must be carried, by ten rounds of Sinkhorn in logarithms."""
    cost = (model(noise)[:, None] - real).square().sum(dim=2)
    one, other = torch.zeros(len(noise)), torch.zeros(len(real))
    for _ in range(10):
        one = -blur * ((other - cost) / blur).logsumexp(dim=1)
        other = -blur * ((one[:, None] - cost) / blur).logsumexp(dim=0)
    return one.mean() + other.mean()


def noise_and_points(size: int = 48) -> data.Batches:
    real = data.points(size)
    return lambda step: (torch.randn(size, 4), *real(step))


class CurveVAE(nn.Module):
    """Curves through four numbers; the encoder says their means and the logarithms of their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(20, 48, 8), mlp(4, 48, 20)
        self.weight = 0.02  # of the divergence

    def deviation(self, spread: Tensor) -> Tensor:
        return (spread / 2).exp()

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, dim=-1)
        said = self.decoder(mean + self.deviation(spread) * torch.randn_like(mean))
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1).mean()
        return functional.mse_loss(said, x) + self.weight * divergence


@data.anew
def sines(size: int = 32) -> Batch:
    """Sines of any phase, height and pitch: [N, 20]."""
    time, one = torch.linspace(0, 3, 20), torch.rand(3, size, 1)
    return ((0.5 + one[0]) * torch.sin((1 + 2 * one[1]) * time + 6.28 * one[2]),)


class PointDenoiser(nn.Module):
    """Predicts the noise of points at a time of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2 + 16, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * 2.0 ** torch.arange(8)
        return self.net(torch.cat([x, waves.sin(), waves.cos()], dim=1))


def denoised_points(model: nn.Module, x: Tensor) -> Tensor:
    time, noise = torch.rand(len(x)), torch.randn_like(x)
    kept = (0.5 * math.pi * time).cos()[:, None]
    return functional.mse_loss(model(kept * x + (1 - kept**2).sqrt() * noise, time), noise)


@data.anew
def half_circles(size: int = 64, *, scale: float = 1.0) -> Batch:
    """Two half circles: [N, 2]."""
    angle, which = math.pi * torch.rand(size), torch.randint(0, 2, (size,)).float()
    sign = 1 - 2 * which
    x = torch.stack([sign * angle.cos() + which - 0.5, sign * angle.sin() + 0.5 * which - 0.25], dim=1)
    return (scale * (x + 0.08 * torch.randn(size, 2)),)


class SpectrumVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(24, 48, 12, act=nn.SiLU), mlp(6, 48, 24, act=nn.SiLU)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        said = self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
        return (said - x).square().sum(1).mean() + weight * divergence


def spectra(size: int = 32) -> data.Batches:
    """Sums of two peaks, and the weight of the divergence, which grows within the first 150 steps: [N, 24] and []."""
    places = torch.linspace(0, 1, 24)

    def batch(step: int) -> Batch:
        peaks = torch.rand(2, size, 1)
        x = (-((places - peaks[0]) ** 2) / 0.02).exp() + (-((places - peaks[1]) ** 2) / 0.01).exp()
        return x, torch.tensor(min(1.0, step / 150))

    return batch


class Couplings(nn.Module):
    """RealNVP in two dimensions, after a scale of its own."""

    def __init__(self, scale: float = 20.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((2,), math.log(scale)))
        self.nets = nn.ModuleList(mlp(1, 24, 24, 2, act=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Minus the logarithm of the density."""
        z, volume = x * self.log_scale.exp(), self.log_scale.sum()
        for net in self.nets:
            kept, changed = z.chunk(2, dim=1)
            log_s, shift = net(kept).chunk(2, dim=1)
            log_s = torch.tanh(log_s)
            z, volume = torch.cat([changed * log_s.exp() + shift, kept], dim=1), volume + log_s[:, 0]
        return (0.5 * z.square().sum(1) + math.log(2 * math.pi) - volume).mean()


class Codebook(nn.Module):
    """A vector-quantised autoencoder, straight through; codes lie on a ball."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = mlp(24, 48, 8), mlp(8, 48, 24), nn.Embedding(32, 8)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        z, codes = functional.normalize(self.encoder(x), dim=1), functional.normalize(self.codes.weight, dim=1)
        code = codes[(z @ codes.mT).argmax(1)]
        said = self.decoder(z + (code - z).detach())
        commitment = functional.mse_loss(code, z.detach()) + 0.25 * functional.mse_loss(z, code.detach())
        return 20 * functional.mse_loss(said, x) + commitment
