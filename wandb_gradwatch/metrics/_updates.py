"""Updates: by how much each parameter changed, and how that compares with the parameter itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .._capture.parameter_registry import NameFilter
from .._capture.probes import WatchedTensor
from .._measure.measure import measure, sum_sq
from .._measure.probe_values import Distance, ProbeSums
from .._runtime.sharding import local_part
from ..snapshot import keys
from ._module_index import ModuleIndex
from ._module_probe import ParameterProbe
from ._rows import histograms_of

_MIB: Final = 2**20
_CHANGE: Final = Distance("norm", "ratio")


class Updates(ParameterProbe):
    """The norm of each parameter's change in a step, and its ratio to the parameter's norm before.

    Logs `update/<parameter>/norm` and `update/<parameter>/ratio`. A healthy ratio is often quoted as 1e-3. It is
    missing for a parameter that was all zero. The change is what the optimizer did: learning rate, momentum, weight
    decay and all. Of a sharded parameter each rank measures its shard, and both numbers are those of the whole: they
    are merged over the ranks when the window is flushed.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        max_mib: the memory that the copies may take on one rank.

    Memory: one copy of the matching parameters (of this rank's shards of them), from before to after the optimizer's
    step, in sampled steps only; and one parameter's change at a time, in float32 where it is half precision.

    Raises:
        ValueError: match matches nothing, or its parameters exceed max_mib; both by watch().
    """

    logs = frozenset({(keys.UPDATE, "norm"), (keys.UPDATE, "ratio")})

    def __init__(self, match: NameFilter | None = None, *, max_mib: float = 1024) -> None:
        super().__init__(match)
        self._max_mib = max_mib

    def bind(self, models: ModuleIndex) -> None:
        super().bind(models)
        parts = [local_part(one) for name, one in models.watched_parameters().items() if self._matches(name)]
        size = sum(part.numel() * part.element_size() for part in parts) / _MIB
        if size > self._max_mib:
            raise ValueError(
                f"{self!r} would copy {size:.0f} MiB of parameters at each sampled step, more than "
                f"max_mib={self._max_mib:g}; match fewer parameters, or raise max_mib"
            )

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._is_due:
            self._befores.keep(tensor for tensor in tensors if self._matches(tensor.name))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for name, change, before in self._befores.changes(tensors):
            self._found[f"{keys.UPDATE}/{name}"] = ProbeSums(sum_sq([change, before]), _CHANGE, name)


class ParameterHistograms(ParameterProbe):
    """Count each parameter that an optimizer has just updated in the fixed bins of gradients.

    Of a sharded parameter each rank counts its shard; the counts add up when the window is merged over the ranks.
    Cost: at the steps that have a histogram one batched pass over the parameters.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend

    def __repr__(self) -> str:
        return "the histograms of parameters"

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(histogram_is_due, histogram_is_due)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        for device in dict.fromkeys(tensor.parameter.device for tensor in tensors):
            group = [tensor for tensor in tensors if tensor.parameter.device == device]
            measured = measure([one.parameter for one in group], None, histogram=True, backend=self._backend)
            assert measured.histogram is not None
            for one, histogram in zip(group, histograms_of(measured.rows, measured.histogram), strict=True):
                self._found[f"{keys.PARAMETER_HISTOGRAMS}/{one.name}"] = histogram
