"""Who attends on the GPU: our kernels, and torch's backends. Each is timed by the GPU's own events."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from case import Array, Case

FLASH, CUDNN, EFFICIENT, MATH = "flash", "cudnn", "efficient", "math"

#: Torch's names of its backends.
TORCH_BACKENDS = {
    FLASH: "FLASH_ATTENTION",
    CUDNN: "CUDNN_ATTENTION",
    EFFICIENT: "EFFICIENT_ATTENTION",
    MATH: "MATH",
}


class Unsupported(Exception):  # noqa: N818  # it is no error
    """Raised for a case that a contender does not offer; the message says why."""


class Contender(ABC):
    """Attends on one GPU."""

    name: str

    @abstractmethod
    def prepare(self, case: Case) -> None:
        """Put a case on the GPU.

        Raises
        ------
        Unsupported
        """

    @abstractmethod
    def seconds(self) -> float:
        """Attend once, and go back if the case asks for it; return what the GPU took."""

    @abstractmethod
    def results(self) -> dict[str, Array]:
        """Return what came out last, as float32 on the host, by the names of `Case.tensors`."""

    @abstractmethod
    def forget(self) -> None:
        """Give the memory of the case back, if there is any."""


class Ringmpi(Contender):
    """Our kernels: the whole sequence as one block, between the identity and the finished output."""

    def __init__(self, weights: str = "exact") -> None:
        from ringmpi.devices import cuda

        self.name = "ringmpi" if weights == "exact" else f"ringmpi-{weights}"
        self.gpu, self._weights = cuda.gpu_for(0), weights

    def prepare(self, case: Case) -> None:
        """Put a case on the GPU, with room for what is computed."""
        from ringmpi.devices.cuda import CudaDevice
        from ringmpi.encoding import numpy_dtype
        from ringmpi.mask import Mask
        from ringmpi.softmax import State, state_dtype

        self._case, self._dtype = case, numpy_dtype(case.dtype)
        mask, scale = Mask(causal=case.causal), case.head_dim**-0.5
        self._device = device = CudaDevice(mask, scale, self.gpu, self._weights)
        self._inputs = {
            name: device.place(array.astype(self._dtype), self._dtype)
            for name, array in case.inputs().items()
        }
        self._positions = np.arange(case.seq_len)
        shape, kind = self._inputs["q"].shape, state_dtype(self._dtype)
        self._state = State(
            acc=device.full(shape, 0.0, kind),
            row_max=device.full(shape[:-1], 0.0, kind),
            row_sum=device.full(shape[:-1], 0.0, kind),
        )
        self._sums = [device.full(shape, 0.0, kind) for _ in range(3)] if case.backward else []
        self._results: list[Any] = []

    def seconds(self) -> float:
        """Attend once. The host waits only at the end, so that no time of its own is between kernels."""
        from ringmpi.devices import Block, Gradients, Outcome, Queries
        from ringmpi.softmax import IDENTITY

        device, driver, stream = self._device, self._device.driver, self._device.stream
        q, k, v, dout = (self._inputs[name] for name in ("q", "k", "v", "dout"))
        queries, block = Queries(q, self._positions), Block(k, v, self._positions)
        self._results = []  # Memory is given back now, and not while it is measured.
        device.settle()
        begun = driver.record(stream)
        for name, array in vars(self._state).items():
            device.fill(array, IDENTITY.get(name, 0.0))
        device.attend(queries, block, self._state)
        out, lse = device.finish(self._state, self._dtype)
        results = [out]
        if self._case.backward:
            for total in self._sums:
                device.fill(total, 0.0)
            outcome = Outcome(dout, lse, device.delta(dout, out))
            device.attend_backward(queries, outcome, block, Gradients(*self._sums))
            results += [device.rounded(total, self._dtype) for total in self._sums]
        ended = driver.record(stream)
        device.settle()
        self._results = results
        return driver.seconds_between(begun, ended)

    def results(self) -> dict[str, Array]:
        """Return the results."""
        fetched = (self._device.fetch(array).astype(np.float32) for array in self._results)
        return dict(zip(self._case.tensors, fetched, strict=True))

    def forget(self) -> None:
        """Give the device back, and all that it holds."""
        for name in ("_device", "_inputs", "_state", "_sums", "_results"):
            vars(self).pop(name, None)


class Torch(Contender):
    """`scaled_dot_product_attention` by one of torch's backends.

    Parameters
    ----------
    backend : str
        One of `TORCH_BACKENDS`.
    """

    def __init__(self, backend: str) -> None:
        self.name = f"torch-{backend}"
        self._backend = backend

    def prepare(self, case: Case) -> None:
        """Put a case on the GPU, and try it: torch says only then what it does not have."""
        try:
            import torch
        except ImportError as error:
            raise Unsupported(f"torch is not installed ({error})") from error
        self._torch, self._case = torch, case
        dtype = getattr(torch, case.dtype)
        # A backend that does not take a case says why in warnings; the error says only that none is left.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                tensors = {
                    name: torch.from_numpy(array).to("cuda", dtype)
                    for name, array in case.inputs().items()
                }
                self._dout = tensors.pop("dout")
                self._leaves = [tensor.requires_grad_(case.backward) for tensor in tensors.values()]
                self.seconds()
            except RuntimeError as error:
                reasons = [str(one.message).partition("\n")[0] for one in said]
                raise Unsupported("; ".join([str(error).partition("\n")[0], *reasons])) from error

    def seconds(self) -> float:
        """Attend once."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        torch = self._torch
        for leaf in self._leaves:
            leaf.grad = None
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with (
            torch.set_grad_enabled(self._case.backward),
            sdpa_kernel(getattr(SDPBackend, TORCH_BACKENDS[self._backend])),
        ):
            begun.record()
            self._out = scaled_dot_product_attention(*self._leaves, is_causal=self._case.causal)
            if self._case.backward:
                self._out.backward(self._dout)
            ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended)) * 1e-3  # Torch tells milliseconds.

    def results(self) -> dict[str, Array]:
        """Return the results."""
        tensors = [self._out, *(leaf.grad for leaf in self._leaves if self._case.backward)]
        fetched = (tensor.detach().float().cpu().numpy() for tensor in tensors)
        return dict(zip(self._case.tensors, fetched, strict=True))

    def forget(self) -> None:
        """Give the memory back to the GPU: torch keeps what it has freed, and others could not have it."""
        for name in ("_leaves", "_dout", "_out"):
            vars(self).pop(name, None)
        if hasattr(self, "_torch"):
            self._torch.cuda.empty_cache()


def contenders(dtype: str) -> list[Callable[[], Contender]]:
    """Return what makes the contenders of a dtype, ours first; torch's flash and cuDNN take 16 bits only."""
    backends = (EFFICIENT, MATH) if dtype == "float32" else (FLASH, CUDNN)

    def made_by(backend: str) -> Callable[[], Contender]:
        return lambda: Torch(backend)

    ours = [Ringmpi] if dtype == "float32" else [Ringmpi, lambda: Ringmpi("rounded")]
    return [*ours, *map(made_by, backends)]
