"""The elements of a tensor of any layout and dtype: a flat real tensor, and a count of implicit zeros."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .columns import GRADIENT_COLUMNS, IDENTITY_C, ZERO_BIN, ZERO_C, Column

MAX_WITNESSES: Final = 64  # elements of one tensor that are kept from one sample to the next (_transfer/witnesses.py)

Tensors = Sequence[Tensor]
Scale = Tensor | None  # 0-dim


class Measurement(NamedTuple):
    """One row per gradient, and one histogram if requested, on the gradients' device."""

    # [N, C] in float64 (float32 on MPS). The received columns equal those of the gradient itself; the parameter columns
    # are NaN if no parameters were given.
    rows: Tensor
    histogram: Tensor | None  # [N, B] in int64


# The dtypes that all backends read directly, and their codes in the kernels. Other real dtypes are converted to float32
# (fp8) or float64.
NATIVE_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
ITEMSIZES: Final = np.array([dtype.itemsize for dtype in NATIVE_DTYPES])  # by code

_PLAIN: Final = frozenset([Tensor, torch.nn.Parameter])
_FORMATS: Final = {kind: attrgetter("dtype", "layout", f"is_{kind}") for kind in ("cpu", "cuda")}
_READABLE: Final = frozenset((dtype, torch.strided, True) for dtype in NATIVE_DTYPES)


def all_readable(tensors: Sequence[Tensor], kind: str) -> bool:
    """Return whether all tensors are on "cpu" or "cuda" (`kind`), and their elements contiguous at data_ptr()."""
    # Each in one check for all tensors, because a check takes 0.1 us.
    return (
        _PLAIN.issuperset(map(type, tensors))
        and _READABLE.issuperset(map(_FORMATS[kind], tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def readable(tensors: Sequence[Tensor], kind: str) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Return tensors whose memory holds the elements, and their numbers of implicit zeros; () if there are none."""
    if all_readable(tensors, kind):
        return tensors, ()
    pairs = [(tensor, 0) if all_readable([tensor], kind) else elements_of(tensor) for tensor in tensors]
    return [elements for elements, _ in pairs], [num_zeros for _, num_zeros in pairs]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for accumulation on a device: float64, except on MPS, which does not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def bits_of(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers of at most 32 bits; it does not depend on the order."""
    kind = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    return tensor.reshape(-1).view(kind).sum(dtype=torch.int64)


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. The host waits only for a copy to the CPU, which it could otherwise read too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device, by pinned memory for CUDA, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def current_stream(device: torch.device) -> int:
    """Return a cache key for tables on a device: a stream must not read what another stream has not uploaded yet."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def add_implicit_zeros(rows_NC: Tensor, histogram_NB: Tensor | None, num_implicit_zeros: Sequence[int]) -> None:
    """Add the zeros that sparse gradients do not store to the rows and histograms of the stored elements."""
    if not any(num_implicit_zeros):
        return
    counts_N = upload(np.array(num_implicit_zeros, dtype=np.int64), rows_NC.device)
    for column in list(Column)[GRADIENT_COLUMNS]:
        of_zero, values_N = float(ZERO_C[column]), rows_NC[:, column]
        if column.merge == "sum":
            values_N += counts_N * of_zero
        else:
            extreme = torch.minimum if column.merge == "min" else torch.maximum
            values_N.copy_(extreme(values_N, torch.where(counts_N > 0, of_zero, float(IDENTITY_C[column]))))
    if histogram_NB is not None:
        histogram_NB[:, ZERO_BIN] += counts_N


def elements_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor's stored elements, flat and real, and the number of zeros that it does not store.

    The order of the elements may change: no statistic depends on it, and a transposed tensor need not be copied.

    Args:
        tensor: any layout, shape and dtype; a sparse one is coalesced, which on CUDA makes the host wait.

    Returns:
        elements: [E], dense and contiguous, with a dtype in NATIVE_DTYPES; complex elements become magnitudes.
        num_implicit_zeros: the number of elements that the layout does not store.
    """
    stored = tensor.detach() if tensor.requires_grad else tensor
    if type(stored) is not Tensor and is_traceable_wrapper_subclass(stored):
        # A wrapper subclass, such as a float8 weight under FSDP2, has no memory of its own: its address is 0.
        stored = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(stored)
    if stored.layout is not torch.strided:
        stored = _stored_values(stored)
    num_implicit_zeros = 0 if stored is tensor else tensor.numel() - stored.numel()
    if stored.dtype not in NATIVE_DTYPES:
        stored = _as_native(stored)
    return _flat(stored), num_implicit_zeros


def _stored_values(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()  # duplicates are summed: the gradient is their sum
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    return tensor.to_dense()


def _as_native(tensor: Tensor) -> Tensor:
    wide = wide_dtype(tensor.device)
    if tensor.is_complex():
        # In float64 the hypotenuse of two float32 numbers neither overflows nor loses digits. NaN in either part must
        # give NaN, but hypot(nan, inf) is inf.
        real, imaginary = torch.view_as_real(tensor.resolve_conj()).to(wide).unbind(-1)
        return torch.where(torch.isnan(real) | torch.isnan(imaginary), torch.nan, torch.hypot(real, imaginary))
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.to(torch.float32)
    return tensor.to(wide)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        # Read the memory in its own order: a dense tensor in any permutation (channels_last, transposed) needs no copy.
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if tensor.ndim == 1 and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).contiguous()  # reshape may return a strided view, for instance of every other element
