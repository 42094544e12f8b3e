"""The programs that ranks run in test_replicas.py: small trainings of which ranks differ, by mistake or on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import wandb_gradwatch
from wandb_gradwatch import MemorySink

AT_ONCE = 8  # first steps, which are compared at once
STEPS = 120  # of which ranks are compared in a training that says nothing
MOST = 3000  # steps of a training, so that the comparison, which is made in the background, has ended


class Training:
    """One training on one rank. A set-up changes its attributes before it begins."""

    def __init__(self, rank: int, world: int, kind: str) -> None:
        self.rank, self.world, self.kind = rank, world, kind
        torch.manual_seed(7 * rank if "seeds" in kind else 0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        self.model: nn.Module = self.inner
        self.rate = 0.05 + 0.01 * rank * ("rates" in kind)
        self.keeps: list[object] = []  # alive while it trains
        self.between: list[Callable[[int], object]] = []  # called with the step between backward() and step()
        self.after: list[Callable[[int], object]] = []  # called with the step after step()

    def average(self, *prefixes: str) -> None:
        """Average the gradients of these parameters, or of all, over the ranks."""
        for name, parameter in self.inner.named_parameters():
            if name.startswith(prefixes or ("",)):
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + self.rank))
        return (self.model(inputs) - inputs[:, :3].sin()).square().mean()

    def run(self) -> list[dict[str, Any]]:
        """Train until something is told, or until enough steps were compared; return the incidents of this rank."""
        store, sink = dist.distributed_c10d._get_default_store(), MemorySink()
        watcher = wandb_gradwatch.watch(self.model, sinks=[sink], sample_every=1, log_every=10)
        optimizer = torch.optim.SGD(self.inner.parameters(), lr=self.rate)
        for step in range(1, MOST):
            optimizer.zero_grad()
            self.loss(step).backward()
            for call in self.between:
                call(step)
            optimizer.step()
            for call in self.after:
                call(step)
            key = f"{self.kind} {self.world}/{step}"
            if self.rank == 0:
                while step <= AT_ONCE and not sink.alerts and compared_until(watcher) < step:
                    time.sleep(0.01)  # the comparison is made in the background
                    watcher.verdict()  # delivers samples
                is_over = bool(sink.alerts) or compared_until(watcher) >= STEPS
                store.set(key, "over" if is_over else "goes on")
            while not store.check([key]):  # no collective, because these are counted
                time.sleep(0.002)
                watcher.verdict()  # delivers samples
            if store.get(key) == b"over":
                break
        else:
            raise AssertionError(f"{self.kind}: nothing was told or compared in {MOST} steps")
        incidents = watcher.verdict().incidents
        watcher.remove()
        dist.barrier()  # the next training begins on all ranks after the end of this one
        return [one.to_dict() for one in incidents]


def compared_until(watcher: Any) -> int:
    """The newest step of which rank 0 has compared the ranks; 0 if there is none."""
    replicas = watcher._pipeline._replicas
    return 0 if replicas is None or replicas._compared is None else replicas._compared.step


def trained(rank: int, world: int, *, kind: str) -> list[dict[str, Any]]:
    """Train as the kind says; return the incidents of this rank."""
    training = Training(rank, world, kind)
    _SET_UPS[kind](training)
    return training.run()


def _nothing(_: Training) -> None:
    pass


def _ddp(training: Training) -> None:
    training.model = DistributedDataParallel(training.inner)


def _bypassed(training: Training) -> None:
    training.keeps.append(DistributedDataParallel(training.inner))  # and the inner module is trained


def _averaged(training: Training) -> None:
    training.between.append(lambda _: training.average())


def _scaled(training: Training) -> None:
    """From step 4 on, rank 1 scales the gradients of the normalisation."""

    def scale(step: int) -> None:
        if training.rank == 1 and step >= 4:
            for parameter in training.inner[1].parameters():
                parameter.grad *= 0.7

    training.between.append(scale)


def _overwritten(training: Training) -> None:
    def overwrite(step: int) -> None:
        if training.rank == 1 and step == 4:
            with torch.no_grad():
                training.inner[3].weight *= 1.5

    training.after.append(overwrite)


def _loaded(training: Training) -> None:
    if training.rank == 1:
        with torch.no_grad():
            training.inner[0].weight += 0.3


def _experts(training: Training) -> None:
    names = ["3.weight", "3.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(training.inner, names)
    _ddp(training)


def _shared_by_hand(training: Training) -> None:
    training.between.append(lambda _: training.average("0.", "1."))


def _clipped(training: Training) -> None:
    training.between.append(lambda _: nn.utils.clip_grad_norm_(training.inner.parameters(), 0.1))


def _clipped_over_ranks(training: Training) -> None:
    """Clip by the norm of the whole model: shared layers, and the experts of all ranks."""

    def clip(_: int) -> None:
        gradients = [parameter.grad for parameter in training.inner.parameters()]
        shared, own = (sum(one.square().sum() for one in part) for part in (gradients[:4], gradients[4:]))
        dist.all_reduce(own)
        nn.utils.clip_grads_with_norm_(training.inner.parameters(), 0.1, (shared + own).sqrt())

    training.between.append(clip)


def _local_sgd(training: Training, every: int = 7, *, is_outer: bool = False) -> None:
    """Average the parameters now and then, by hand or through an outer optimizer of their differences."""
    parameters = list(training.inner.parameters())
    begun = [parameter.detach().clone() for parameter in parameters]
    outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9)
    if is_outer:
        training.keeps.append(outer)

    def average(step: int) -> None:
        if step % every:
            return
        for parameter, before in zip(parameters, begun, strict=True):
            moved = before - parameter.detach()
            dist.all_reduce(moved)
            moved /= training.world
            with torch.no_grad():
                parameter.copy_(before if is_outer else before - moved)
            parameter.grad = moved
        if is_outer:
            outer.step()
        begun[:] = [parameter.detach().clone() for parameter in parameters]

    training.after.append(average)


def _diloco(training: Training) -> None:
    _local_sgd(training, 100_000, is_outer=True)  # nothing is averaged before the test is over


def _averager(training: Training) -> None:
    training.keeps.append(PeriodicModelAverager(period=100_000))


def _of_all(*set_ups: Callable[[Training], None]) -> Callable[[Training], None]:
    def set_up(training: Training) -> None:
        for one in set_ups:
            one(training)

    return set_up


_SET_UPS: dict[str, Callable[[Training], None]] = {
    # Faults
    "nothing averages": _nothing,
    "DDP bypassed": _bypassed,
    "scaled after DDP": _of_all(_ddp, _scaled),
    "scaled after an average by hand": _of_all(_averaged, _scaled),
    "overwritten": _of_all(_ddp, _overwritten),
    "loaded on one rank": _of_all(_ddp, _loaded),
    "seeds, averaged by hand": _averaged,
    # On purpose
    "DDP": _ddp,
    "averaged by hand": _averaged,
    "DDP, clipped": _of_all(_ddp, _clipped),
    "experts beside DDP": _experts,
    "experts beside an average by hand": _shared_by_hand,
    "experts and clipping": _of_all(_shared_by_hand, _clipped_over_ranks),
    "seeds": _nothing,
    "rates": _nothing,
    "local SGD": _local_sgd,
    "DiLoCo": _diloco,
    "averager of torch": _averager,
    "averager of torch, with DDP": _of_all(_bypassed, _averager),
}
