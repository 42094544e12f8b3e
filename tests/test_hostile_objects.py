"""Objects of the user whose classes raise, never end or contain themselves change no training and end no watching."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from injections import Config, Run
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._runtime import wrappers
from wandb_gradwatch.metrics import Activations, Metric, OptimizerState, Reference, Router, Spectrum, Updates

STEPS = 6


class HostileError(Exception):
    """Raised by the objects of this file."""


def raises(*_: object, **__: object) -> Any:
    raise HostileError


@dataclasses.dataclass
class Unset:
    logits: Tensor
    loss: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class UnsetSlots(Unset):
    more: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class RaisingField:
    logits: Tensor

    def __getattribute__(self, name: str) -> Any:
        return raises() if name == "logits" else super().__getattribute__(name)


class RaisingItems(dict[str, Tensor]):
    items = raises  # type: ignore[assignment]


class Endless(Mapping[str, Any]):
    """A mapping without end, whose values are such mappings."""

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield str(number)

    def __getitem__(self, key: str) -> Any:
        return Endless()

    def __len__(self) -> int:
        return 1


class Russian(Mapping[str, Any]):
    """A mapping of one item, which is a new mapping of one item."""

    def __iter__(self) -> Iterator[str]:
        return iter(["inner"])

    def __getitem__(self, key: str) -> Any:
        return Russian()

    def __len__(self) -> int:
        return 1


class RaisingKey:
    __str__ = __repr__ = __format__ = raises


class RaisingList(list[Tensor]):
    __iter__ = __len__ = __getitem__ = raises


class OddFields(tuple[Tensor, ...]):
    _fields = 3


class Raising:
    """Every operation on it raises, but for its creation."""

    __getattr__ = __iter__ = __len__ = __eq__ = __bool__ = __hash__ = __repr__ = __str__ = __format__ = raises  # type: ignore[assignment]
    __class__ = property(raises)  # type: ignore[assignment]


class RaisingTensor(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise HostileError


def in_itself(tensor: Tensor, kind: type = list) -> Any:
    outer = [tensor] if kind is list else {"tensor": tensor}
    outer.append(outer) if kind is list else outer.update(outer=outer)
    return outer


def deep(tensor: Tensor) -> Any:
    for _ in range(20_000):
        tensor = [tensor]
    return tensor


def doubled(tensor: Tensor) -> Any:
    """2^60 paths lead to the tensor."""
    for _ in range(60):
        tensor = [tensor, tensor]
    return tensor


OBJECTS: dict[str, Callable[[Tensor], Any]] = {
    "unset field": Unset,
    "unset field in slots": UnsetSlots,
    "field that raises": RaisingField,
    "list in itself": in_itself,
    "dict in itself": lambda tensor: in_itself(tensor, dict),
    "deep list": deep,
    "doubled lists": doubled,
    "items() raises": lambda tensor: RaisingItems(a=tensor),
    "endless mapping": lambda tensor: [Endless(), tensor],
    "mapping in mapping in ...": lambda tensor: [Russian(), tensor],
    "key that raises": lambda tensor: {RaisingKey(): tensor},
    "list that raises": lambda tensor: RaisingList([tensor]),
    "named tuple": lambda tensor: collections.namedtuple("Pair", "a b")(tensor, Raising()),
    "odd fields": lambda tensor: OddFields((tensor,)),
    "object that raises": lambda tensor: [Raising(), tensor],
    "object alone": lambda tensor: Raising(),
    "generator": lambda tensor: (each for each in [tensor]),
    "generator that raises": lambda tensor: (raises() for _ in range(1)),
    "class": lambda tensor: Unset,
    "tensor that raises": lambda tensor: [tensor.detach().as_subclass(RaisingTensor), tensor],
    "nothing": lambda tensor: None,
}

MODES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "guard": lambda model: {"guard": "skip"},
    "function": lambda model: {"guard": lambda snapshot: False},
    "trace": lambda model: {"on_nonfinite": "trace", "rules": None},
    "activations": lambda model: {"metrics": [Activations(of=("input", "output", "grad"))]},
    "metrics": lambda model: {"metrics": [Metric("own", torch.abs, on="activation"), Router("inner.layer", top_k=1)]},
    "reference": lambda model: {"metrics": [Reference(model, activations=".")]},
}


class Inner(nn.Module):
    """Returns an object made of its result, which it also keeps."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make
        self.result: list[Tensor] = []

    def forward(self, x: Tensor, given: object = None, *, named: object = None) -> Any:
        made = self.make(result := self.layer(x))
        self.result[:] = [result]
        return made


class Outer(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make = Inner(make), make

    def forward(self, x: Tensor, *given: object, **named: object) -> Any:
        returned = self.inner(x, self.make(x), named=self.make(x))
        return returned


def trained(make: Callable[[Tensor], Any], options: Callable[[nn.Module], dict[str, Any]] | None) -> Any:
    """Train, and return the parameters and the steps that were measured. The third step has a NaN."""
    torch.manual_seed(0)
    model, sink = Outer(make), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = None
    if options is not None:
        given = {"sinks": [sink], "rules": [], "sample_every": 1, "log_every": 1} | options(model)
        watcher = wandb_gradwatch.watch(model, **given)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((2, 4), 1.0 + step)
        model(x, make(x), named=make(x))
        (model.inner.result[0].square().mean() * (float("nan") if step == 2 else 1.0)).backward()
        if step != 2:
            optimizer.step()
    if watcher is not None:
        watcher.remove()
    merged = sink.merged()
    return [p.tolist() for p in model.parameters()], None if merged is None else merged.steps.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_model_gets_and_returns_changes_no_training(
    name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrappers._say_left_out.cache_clear()
    plain, _ = trained(OBJECTS[name], None)
    watched, steps = trained(OBJECTS[name], MODES[mode])
    assert watched == plain
    assert steps is not None
    assert steps[-1] == STEPS - 1, "watching went on to the last update"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]
    assert not errors
    left_out = [record.getMessage() for record in caplog.records if "are left out" in record.getMessage()]
    assert len(left_out) == len(set(left_out))


def paths(output: Any) -> list[str]:
    return [path for path, _ in wrappers.leaves_in(output)]


def test_readable_tensors_beside_unreadable_objects_are_found() -> None:
    tensor = torch.ones(1)
    assert paths([Raising(), {"a": tensor}, RaisingItems(b=tensor), (tensor,)]) == ["output_1_a", "output_3_0"]
    assert paths(in_itself(tensor)) == ["output_0"]
    assert paths(Unset(tensor)) == ["output_logits"]
    assert paths(tensor) == [""]
    shared = [tensor]
    assert paths([shared, shared]) == ["output_0_0"], "a container is visited once"


class OddGroups(torch.optim.SGD):
    """Adds a group without parameters, and values of other types than torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0] |= {"params": list(self.param_groups[0]["params"]), "name": Raising(), "betas": "odd"}


def optimizer_class(**attributes: Any) -> type[torch.optim.SGD]:
    return type("HostileSGD", (torch.optim.SGD,), attributes)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "state_dict() raises": optimizer_class(state_dict=raises),
    "compares and hashes raise": optimizer_class(__eq__=raises, __hash__=raises, __bool__=raises, __len__=raises),
    "repr raises": optimizer_class(__repr__=raises, __str__=raises),
    "odd groups": OddGroups,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("guard", [None, "skip"])
def test_optimizers_whose_methods_raise_train_as_without_us(name: str, guard: Any) -> None:
    def train(*, watched: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1)
        with_nothing: Any = optimizer_class()([torch.ones(1)], lr=0.1)
        with_nothing.param_groups = [{}]
        if watched:
            metrics = [OptimizerState(), Updates(), Spectrum()]
            watcher = wandb_gradwatch.watch(model, sinks=[MemorySink()], metrics=metrics, guard=guard, sample_every=1)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
            optimizer.step()
            with pytest.raises(KeyError, match="params"):
                with_nothing.step()
        if watched:
            watcher.remove()
        return [parameter.tolist() for parameter in model.parameters()]

    assert train(watched=True) == train(watched=False)


class RaisingSummary(dict[str, Any]):
    update = __setitem__ = raises


class RaisingConfig(Config):
    update = raises


RUNS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "alert": {"alert": raises},
    "define_metric": {"define_metric": raises},
    "step": {"step": property(raises)},
    "summary": {"summary": RaisingSummary()},
    "config": {"config": RaisingConfig()},
    "dir": {"dir": property(raises)},
    "finish": {"_finish": raises},
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_whose_methods_raise_keep_the_users_rows_and_the_training(name: str) -> None:
    def train(*, watched: bool) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model, run = nn.Linear(4, 4), Run()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watched:
            watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=2)
            # From now on: watch() itself may refuse a run at once.
            run.__class__ = type("HostileRun", (Run,), RUNS[name])
        for step in range(STEPS):
            optimizer.zero_grad()
            factor = float("nan") if step == 2 else 1.0  # for an alert
            (model(torch.full((2, 4), 1.0 + step)).square().mean() * factor).backward()
            if step != 2:
                optimizer.step()
            run.log({"user": step})
        if watched:
            watcher.remove()
        rows = [(step, {key: value for key, value in row.items() if key == "user"}) for step, row in run.core.rows]
        return [parameter.tolist() for parameter in model.parameters()], [row for row in rows if row[1]]

    assert train(watched=True) == train(watched=False)


def test_a_note_of_an_object_whose_repr_raises_is_kept_without_its_value() -> None:
    watcher = wandb_gradwatch.watch(nn.Linear(1, 1), sinks=[MemorySink()])
    watcher.note(batch=RaisingKey(), number=3)
    assert watcher._dispatcher.recorder.notes == {1: {"batch": "RaisingKey without repr(): HostileError", "number": 3}}
    watcher.remove()
