"""Train a small GPT with every metric of the package: python examples/everything_on.py

Prints the cost of each metric on this machine, and writes the run's page to everything_on.html. To see the cost of
Ranks(), run it on several ranks: torchrun --nproc-per-node 2 examples/everything_on.py
"""

import os
import statistics
import time

import torch
import wandb
from torch import nn

import wandb_gradwatch
from wandb_gradwatch import metrics
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.read import read_finished_run

os.environ.setdefault("WANDB_MODE", "offline")  # no account needed; `wandb sync` uploads the run later

STEPS, SAMPLE_EVERY = int(os.environ.get("STEPS", "200")), int(os.environ.get("SAMPLE_EVERY", "10"))
DIM, HEADS, LENGTH, BATCH = 128, 4, 64, 16
TEXT = "what is watched grows well; what grows too fast is watched and named before it is lost. " * 200


class SelfAttention(metrics.MonitorMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.log_attention(q, k, v, is_causal=True)  # does nothing unless this step is sampled
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4), nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(w[..., None] * e(x) for w, e in zip(self.gate(x).softmax(-1).unbind(-1), self.experts, strict=True))


class Block(nn.Module):
    def __init__(self, of_experts: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(DIM), SelfAttention(), nn.LayerNorm(DIM)
        self.mlp = Experts() if of_experts else mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x := x + self.attn(self.ln_1(x))) + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block(of_experts=place == 2) for place in range(4)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places.weight)))


def main() -> None:
    rank, is_one_of_several = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    torch.manual_seed(rank)
    letters = sorted(set(TEXT))
    data, model = torch.tensor([letters.index(letter) for letter in TEXT]), GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    everything = [
        metrics.Activations(r"^blocks\.\d+$|mlp\.1$|head"),
        metrics.Activations(r"mlp\.0$", of=("input", "grad"), statistics=["norm", "rms"]),
        metrics.Attention(),
        metrics.Router("gate$", top_k=2),
        metrics.Updates(),
        metrics.OptimizerState(),
        metrics.NoiseScale(batch_size=BATCH // 2),
        metrics.Ranks(),
        metrics.Reference(model, match="weight$", activations=r"^blocks\.\d+$"),
        metrics.Spectrum(r"(qkv|out)\.weight$", of=("parameter", "gradient", "update")),
        metrics.Metric("rms", lambda w: w.square().mean().sqrt(), match=r"(qkv|out)\.weight$", every=5),
        metrics.Metric(
            "kurtosis", lambda a: (a - a.mean()).pow(4).mean() / a.var() ** 2, on="activation", match=r"s\.\d$"
        ),
    ]
    if is_one_of_several:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    with wandb.init(project="gradwatch-examples", name="everything_on", mode="disabled" if rank else None) as run:
        watcher, times = wandb_gradwatch.watch(model, sample_every=SAMPLE_EVERY, metrics=everything), []
        for _ in range(STEPS):
            began = time.perf_counter()
            starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
            batch = torch.stack([data[start : start + LENGTH + 1] for start in starts])
            optimizer.zero_grad()
            for half in batch.chunk(2):  # two micro-batches: NoiseScale compares their gradients
                loss = nn.functional.cross_entropy(model(half[:, :-1]).flatten(0, 1), half[:, 1:].flatten())
                (loss / 2).backward()
            optimizer.step()
            wandb.log({"loss": loss.item()})
            times.append(1000 * (time.perf_counter() - began))
        watcher.remove()  # the last flush communicates between the ranks: call it on every rank
    if is_one_of_several:
        torch.distributed.destroy_process_group()
    if rank:
        return
    print(f"final loss {loss.item():.5f}, {statistics.median(times):.1f} ms per step")
    sampled, share = statistics.median(times[SAMPLE_EVERY - 1 :: SAMPLE_EVERY]), watcher.latest.overhead_ratio
    print(f"sampled steps, 1 in {SAMPLE_EVERY}: {sampled:.1f} ms per step; monitoring takes {share:.1%} of the time")
    for metric, seconds in watcher.metric_seconds.items():
        print(f"{1000 * seconds * SAMPLE_EVERY / STEPS:8.2f} ms per sampled step: {metric}")
    print(f"page: {write_page(read_finished_run(os.path.dirname(run.dir)), 'everything_on.html')}")


if __name__ == "__main__":
    main()
