"""Queries to torch's autograd engine."""

import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Entry = tuple[int, Tensor]  # a watched parameter: its slot (the index of its row) and the parameter

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # returns -1 outside of a backward
num_nodes_made: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr  # nodes made so far by this thread


class _Replay(threading.local):
    is_running = False


replay: Final = _Replay()  # True while we run a forward and backward for a search, which is not part of the training
