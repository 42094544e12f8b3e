"""What a parameter is, from its name, its module and its shape: known before any gradient arrives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._analysis.layers import ModuleKinds, branch_of, modules_of
from .._measure.columns import BoolArray, FloatArray

# P watched parameters, L modules in model order (the first is nearest the input)

MIN_WEIGHTS: Final = 64  # elements: a smaller parameter is a scale or a temperature, and no layer's weights
_RECURRENT: Final = re.compile(r"(weight|bias)_(hh|ih)|(^| )(RNN|LSTM|GRU)")
_RELU: Final = re.compile(r"ReLU")
_SQUASHES: Final = re.compile(r"Sigmoid|Tanh|Softsign|GRU|LSTM")
_ATTENTION: Final = re.compile(r"att|qkv|query|key|\bq_|\bk_", re.IGNORECASE)
_ROUTER: Final = re.compile(r"router|gate", re.IGNORECASE)
_EXPERT: Final = re.compile(r"expert", re.IGNORECASE)


@dataclass(frozen=True)
class ModelInfo:
    """What the capture knows of the model: class names of the modules by name, and the parameters' shapes by name."""

    classes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1  # that train together: the gradients may come from the batches of others


class Structure:
    """The static facts of these parameters, in their order.

    Args:
        names: [P] the parameters' names.
        info: what the capture knows of the model.
    """

    def __init__(self, names: tuple[str, ...], info: ModelInfo) -> None:
        self.names = names
        self.info = info
        self.modules: ModuleKinds = modules_of(names)
        self.module_P: npt.NDArray[np.intp] = self.modules.of_parameter
        self.is_bias_P: BoolArray = self.modules.is_bias
        owners = [name.rpartition(".")[0] for name in names]
        self.class_P = tuple(info.classes.get(owner, "") for owner in owners)
        self.class_L = tuple(info.classes.get(name, "") for name in self.modules.names)
        following = dict(zip(info.classes, [*info.classes.values()][1:], strict=False))
        self.next_class_L = tuple(following.get(name, "") for name in self.modules.names)
        self.is_recurrent_P = _matches(_RECURRENT, [f"{n} {c}" for n, c in zip(names, self.class_P, strict=True)])
        self.is_norm_P = np.array(["Norm" in one for one in self.class_P], dtype=bool)
        self.is_embedding_P = np.array(["Embedding" in one for one in self.class_P], dtype=bool)
        self.is_attention_P = _matches(_ATTENTION, names) | _matches(re.compile("Attention"), self.class_P)
        self.is_router_P = _matches(_ROUTER, names) & bool(_matches(_EXPERT, names).any())
        self.is_expert_P = _matches(_EXPERT, names)
        self.branch_L = tuple(branch_of(name) for name in self.modules.names)
        self.has_batch_norm = any("BatchNorm" in one for one in info.classes.values())
        self.begins_with_norm = bool(self.class_L) and "Norm" in self.class_L[0]
        self.has_norm = any("Norm" in one for one in info.classes.values())
        self.has_relu = any(_RELU.search(one) for one in info.classes.values())
        self.squashes = any(_SQUASHES.search(one) for one in info.classes.values())
        self.has_dropout = any("Dropout" in one for one in info.classes.values())
        self.num_layers = len({place for place, bias in zip(self.module_P, self.is_bias_P, strict=True) if not bias})
        self.fan_in_P = np.array([_fan_in(info.shapes.get(name)) for name in names])

    def is_weight(self, size_P: FloatArray) -> BoolArray:
        """Which parameters are weights of a layer: [P]."""
        weights_P: BoolArray = ~self.is_bias_P & (size_P >= MIN_WEIGHTS)
        return weights_P

    def feeds_relu(self, module: int) -> bool:
        """Whether a ReLU follows this module, as far as the order of the modules shows."""
        return bool(_RELU.search(self.next_class_L[module]))


def _fan_in(shape: tuple[int, ...] | None) -> float:
    """The number of inputs of a unit; NaN for a parameter without units, or of unknown shape."""
    return math.nan if shape is None or len(shape) < 2 else float(math.prod(shape[1:]))


def _matches(pattern: re.Pattern[str], names: Any) -> BoolArray:
    return np.array([bool(pattern.search(name)) for name in names], dtype=bool)
