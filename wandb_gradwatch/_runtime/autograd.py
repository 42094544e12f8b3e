"""What the rest of the package asks of torch's autograd engine, and the type of a watched parameter's entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Entry = tuple[int, Tensor]  # a slot (the parameter's row) and its parameter

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # -1 outside a backward
