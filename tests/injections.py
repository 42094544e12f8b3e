"""Raise an exception in every function of the package that runs in a training, one per forked process.

The training runs twice under `sys.settrace`: to count the calls, and to fork at one call of each function, its first
one or one in the middle. In the child this call raises. The child trains to the end, and compares what it has made with
a training without the package.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from user_programs import OpenRow

import wandb_gradwatch
from wandb_gradwatch import ConsoleSink, MemorySink, SkipGuard, Watcher
from wandb_gradwatch import metrics as metrics_module

PACKAGE = str(Path(wandb_gradwatch.__file__).parent) + os.sep
_SECONDS = 120  # after which a training has hung

# The frames that others call. Their first instruction begins the boundary, so that nothing of ours is above the
# outermost of them, and an exception on its entry cannot be caught. Below a boundary they raise like all functions.
BOUNDARIES = {
    ("_boundary.py", "enter"),  # of `entry_point`: all hooks, callbacks and methods; only a try
    ("_runtime/wrappers.py", "__call__"),  # of `TransientHook`: the same in one frame
}
OUTERMOST = BOUNDARIES | {
    ("_boundary.py", "call"),  # of `around`: the wrappers of clipping, scalers, closures and run.log; three calls
    ("sinks/_row_scheduler.py", "_user_log"),  # takes the lock around `call`
    ("metrics/_forward_hooks.py", "log_tensor"),  # the forward of the user's module calls it: only a call of `enter`
    ("metrics/_forward_hooks.py", "log_attention"),
}


class InjectedError(Exception):
    """Raised where the package has no fault."""


class Block(metrics_module.MonitorMixin, nn.Module):
    """A small transformer block with a tensor that it logs itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.first(x).relu())
        self.log_tensor("hidden", hidden)
        self.log_attention(hidden, hidden)
        return {"out": hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 8), Block(), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens))["out"].mean(1))


class Run:
    """A W&B run by the model of W&B's rules in user_programs.py."""

    disabled = offline = False
    id = "injected"

    def __init__(self) -> None:
        self.core, self.starting_step, self.config, self.summary = OpenRow(), 0, Config(), {}
        self.settings, self.dir = SimpleNamespace(mode="offline"), "."

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def alert(self, **_: Any) -> None: ...

    def _log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        self.core.log(data, step, commit)

    def log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        self._log(data, step=step, commit=commit)

    @property
    def step(self) -> int:
        return self.core.cur

    def finish(self) -> None:
        self.core.close()


class Config(dict[str, Any]):
    def update(self, values: Any, **_: Any) -> None:
        super().update(values)


@dataclass
class Training:
    """A training under way. `watcher` is None in the one that the others are compared with."""

    model: nn.Module
    watcher: Watcher | None
    run: Run
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def loss(self, factor: float = 1.0) -> Tensor:
        tokens = torch.randint(0, 11, (4, 5), generator=self.generator)
        labels = torch.randint(0, 3, (4,), generator=self.generator)
        return nn.functional.cross_entropy(self.model(tokens), labels) * factor


def everything(training: Training) -> None:
    model, watcher = training.model, training.watcher
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        optimizer.zero_grad()
        for _ in range(2):
            loss = training.loss(float("nan") if step == 7 else 0.5)
            loss.backward()
        nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.5)
        if watcher is not None:
            watcher.loss(loss.detach())
            watcher.note(batch=step)
            assert watcher.step is not None
        if step != 7:
            optimizer.step()
        model.eval()
        with torch.no_grad():
            training.loss()
        model.train()
    if watcher is not None:
        assert watcher.verdict().sentence
        str(watcher.summary())
        watcher.wait()
        dict(watcher.state_dict())
        list(watcher.record(os.devnull + "/no such folder"))
        assert watcher.latest is None or watcher.latest.names is not None


def default(training: Training) -> None:
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(60):
        optimizer.zero_grad()
        training.loss(1e3 if step == 45 else 1.0).backward()
        nn.utils.clip_grad_value_(training.model.parameters(), 0.5)
        optimizer.step()


def scaled(training: Training) -> None:
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(16):
        optimizer.zero_grad()
        scaler.scale(training.loss(float("inf") if step == 8 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def guarded(training: Training, **options: Any) -> None:
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2, **options)
    for step in range(16):
        optimizer.zero_grad()
        training.loss(float("nan") if step == 13 else 1.0).backward()
        optimizer.step()


def closures(training: Training) -> None:
    optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)


def by_hand(training: Training) -> None:
    for _ in range(60):
        training.loss().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def marked(training: Training) -> None:
    for _ in range(60):
        by = torch.autograd.grad(training.loss(), parameters := list(training.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, by, strict=True):
                parameter.grad = gradient
                parameter -= 0.01 * gradient
        if training.watcher is not None:
            training.watcher.mark_step()


def changing(training: Training) -> None:
    model: Any = training.model
    optimizer = torch.optim.SGD([*model.block.parameters(), *model.embedding.parameters()], lr=1e-2)
    other = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    for step in range(24):
        if step in (6, 10):
            model.block.first.weight.requires_grad_(step == 10)
        if step == 14:
            model.head = nn.Linear(8, 3)
            other.add_param_group({"params": list(model.head.parameters())})
        training.loss().backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad(set_to_none=False)
        other.zero_grad()
        if training.watcher is not None and step % 9 == 8:
            training.watcher.flush()


def logging_rows(training: Training) -> None:
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)
    for step in range(16):
        optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        optimizer.step()
        training.run.log({"loss": step}, step=None if step < 8 else 3 * step)
        training.run.log({"text": "no number"}, commit=False)
    training.run.finish()


def _metrics() -> list[Any]:
    every = [metrics_module.Metric("mean", lambda tensor: tensor.mean(), on="gradient"), metrics_module.Attention()]
    every += [metrics_module.Activations(of=("input", "output", "grad"))]
    every += [metrics_module.Activations("head", evaluation=True)]
    return [*every, *(getattr(metrics_module, name)() for name in ("OptimizerState", "Updates", "Spectrum"))]


_EVERY_STEP = {"sample_every": 1, "log_every": 4, "backend": "cpu"}
# By name: the loop, and the options of watch(). "RUN" is replaced by the run.
CONFIGURATIONS: dict[str, tuple[Callable[[Training], None], Callable[[], dict[str, Any]]]] = {
    "everything": (
        everything,
        lambda: {
            **_EVERY_STEP,
            "sinks": [MemorySink(), ConsoleSink(io.StringIO())],
            "metrics": _metrics(),
            "details": ("mean", "std", "abs_max"),
            "group_by": "module",
            "log": "all",
            "on_alert": lambda alert: None,
        },
    ),
    "default": (default, lambda: {"log_every": 20, "sinks": [MemorySink()]}),
    "scaled": (scaled, lambda: {**_EVERY_STEP, "sample_every": 2, "on_nonfinite": "trace", "sinks": [MemorySink()]}),
    "guarded": (guarded, lambda: {**_EVERY_STEP, "guard": "skip", "sinks": [MemorySink()]}),
    "fused": (
        partial(guarded, fused=True),
        lambda: {**_EVERY_STEP, "guard": SkipGuard(then="continue"), "sinks": [MemorySink()]},
    ),
    "closures": (closures, lambda: {**_EVERY_STEP, "sinks": [MemorySink()]}),
    "by hand": (by_hand, lambda: {**_EVERY_STEP, "sample_every": 12, "sinks": [MemorySink()]}),
    "marked": (marked, lambda: {**_EVERY_STEP, "sample_every": 12, "sinks": [MemorySink()]}),
    "changing": (changing, lambda: {**_EVERY_STEP, "sample_every": 3, "log_every": 9, "sinks": [MemorySink()]}),
    "rows": (logging_rows, lambda: {**_EVERY_STEP, "log_every": 2, "run": "RUN", "details": ("mean",)}),
}


FIRST = "everything"


def train(name: str, *, watched: bool, begins: Callable[[], None] = lambda: None) -> str:
    """Train, and return what the training has made: the parameters, and the user's rows. `begins`: after watch()."""
    torch.manual_seed(0)
    loop, options = CONFIGURATIONS[name]
    model, run, watcher = Model(), Run(), None
    if watched:
        given = options()
        watcher = wandb_gradwatch.watch(model, **(given | {"run": run} if "run" in given else given))
    begins()
    loop(Training(model, watcher, run))
    if watcher is not None:
        watcher.remove()
    rows = [{key: value for key, value in row.items() if key in ("loss", "text")} for _, row in run.core.rows]
    steps = [step for step, _ in run.core.rows]
    parameters = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    return json.dumps([parameters, rows, steps])


class Calls:
    """Traces the calls of the package's functions, except those of the outermost frames."""

    def __init__(self, seen: Callable[[CodeType, int, bool], None]) -> None:
        self.num: Counter[CodeType] = Counter()
        self._seen = seen

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        above = [one for one in callers(frame.f_back) if place(one.f_code) in BOUNDARIES]
        if above or place(code) not in OUTERMOST:
            self.num[code] += 1
            self._seen(code, self.num[code], above in ([], [frame.f_back]))


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place(code: CodeType) -> tuple[str, str]:
    return code.co_filename.removeprefix(PACKAGE), code.co_name


def inject(name: str, part: int, num_parts: int, path: str, only_entries: bool = False) -> None:
    """Inject into one part of the functions of a configuration; write the results as lines of JSON to the path.

    Entries, the functions that others call right below a boundary, are injected in every configuration, and no others
    with `only_entries`. All other functions are injected in the first configuration that runs them.
    """
    logging.getLogger("wandb_gradwatch").addHandler(errors := Errors())
    torch.set_num_threads(1)
    process, expected = os.getpid(), {train(name, watched=False)}
    watched = train(name, watched=True)  # also fills caches
    if "guard" in CONFIGURATIONS[name][1]():
        expected.add(watched)  # by a guard that fails after the step that it has skipped
    assert watched in expected, "the watched training is another one"
    entries: set[CodeType] = set()
    num_calls = counted(name, entries)
    earlier = set(num_calls if only_entries else () if name == FIRST else counted(FIRST, set()))
    codes = [code for code in num_calls if code in entries or code not in earlier]
    # By code: the call that raises.
    due = {code: 1 if at % 2 else (num_calls[code] + 1) // 2 for at, code in enumerate(codes) if at % num_parts == part}
    injected: dict[str, Any] = {}

    def fork(code: CodeType, number: int, _: bool) -> None:
        if due.get(code) != number:
            return
        del due[code]
        where = {"file": code.co_filename.removeprefix(PACKAGE), "line": code.co_firstlineno, "function": code.co_name}
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            assert status == 0, f"the process of {where} ended with {status}"
            return
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        os.getpid = lambda: process  # the package does nothing in forked processes
        injected.update(where, call=number)
        errors.messages.clear()
        raise InjectedError

    raised = made = None
    try:
        made = train(name, watched=True, begins=lambda: sys.settrace(Calls(fork).trace))
    except BaseException as error:
        if not injected:
            raise
        raised = repr(error)
    finally:
        sys.settrace(None)
    if injected:
        with open(path, "a", encoding="utf-8") as file:
            result = injected | {"raised": raised, "is_equal": made in expected, "errors": errors.messages}
            file.write(json.dumps(result) + "\n")
        os._exit(0)


def counted(name: str, entries: set[CodeType]) -> Counter[CodeType]:
    """Return how often each function is called in a training; add the functions that others call to `entries`."""
    calls = Calls(lambda code, _, is_entry: entries.add(code) if is_entry else None)
    train(name, watched=True, begins=lambda: sys.settrace(calls.trace))
    sys.settrace(None)
    return calls.num


class Errors(logging.Handler):
    """Keeps the messages of level ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


if __name__ == "__main__":
    inject(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], bool(sys.argv[5:]))
