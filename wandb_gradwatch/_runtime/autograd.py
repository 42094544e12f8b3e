"""What the rest of the package asks of torch's autograd engine, and the type of a watched parameter's entry."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Entry = tuple[int, Tensor]  # a slot (the parameter's row) and its parameter

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # -1 outside a backward


class _Replay(threading.local):
    is_running = False


replay: Final = _Replay()  # a forward and backward that we run to look at: no part of the training
