"""Who attends on the GPU: our kernels, and torch's backends. Each is timed by the GPU's own events."""

from __future__ import annotations

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
        """Return what came out last, as float32 on the host: ``out``, and ``dq`` if there is one."""


class Ringmpi(Contender):
    """Our kernels: the whole sequence as one block, between the identity and the finished output."""

    name = "ringmpi"

    def __init__(self) -> None:
        from ringmpi.devices import cuda

        self.gpu = cuda.gpu_for(0)

    def prepare(self, case: Case) -> None:
        """Put a case on the GPU, and find out what the backward pass needs of the forward one."""
        from ringmpi.devices.cuda import CudaDevice
        from ringmpi.encoding import numpy_dtype
        from ringmpi.mask import Mask

        self._case, self._dtype = case, numpy_dtype(case.dtype)
        self._device = CudaDevice(Mask(causal=case.causal), case.head_dim**-0.5, self.gpu)
        arrays = {name: array.astype(self._dtype) for name, array in case.inputs().items()}
        self._inputs = {name: self._device.place(array, self._dtype) for name, array in arrays.items()}
        self._positions = np.arange(case.seq_len)

    def seconds(self) -> float:
        """Attend once; a clock of the host would count what Python takes to launch."""
        from ringmpi.devices import Block, Gradients, Outcome, Queries
        from ringmpi.softmax import State, state_dtype

        device, kind = self._device, state_dtype(self._dtype)
        q, k, v, dout = (self._inputs[name] for name in ("q", "k", "v", "dout"))
        state = State(
            acc=device.full(q.shape, 0.0, kind),
            row_max=device.full(q.shape[:-1], -np.inf, kind),
            row_sum=device.full(q.shape[:-1], 0.0, kind),
        )
        sums = [device.full(q.shape, 0.0, kind) for _ in range(3)] if self._case.backward else []
        queries, block = Queries(q, self._positions), Block(k, v, self._positions)
        driver, stream = device.driver, device.stream
        device.settle()  # What has been made ready is not timed.
        begun = driver.record(stream)
        _finished(device.attend(queries, block, state))
        self._out, lse = device.finish(state, self._dtype)
        if self._case.backward:
            outcome = Outcome(dout, lse, device.delta(dout, self._out))
            _finished(device.attend_backward(queries, outcome, block, Gradients(*sums)))
            self._gradients = [device.rounded(total, self._dtype) for total in sums]
        ended = driver.record(stream)
        device.settle()
        return driver.seconds_between(begun, ended)

    def results(self) -> dict[str, Array]:
        """Return out and dq."""
        found = {"out": self._out}
        if self._case.backward:
            found["dq"] = self._gradients[0]
        return {name: self._device.fetch(array).astype(np.float32) for name, array in found.items()}


def _finished(work: Any) -> None:
    while not work.advance():
        pass


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
        import torch

        self._torch, self._case = torch, case
        dtype = getattr(torch, case.dtype)
        arrays = case.inputs()
        tensors = {name: torch.from_numpy(a).to("cuda", dtype) for name, a in arrays.items()}
        self._dout = tensors.pop("dout")
        self._leaves = [tensor.requires_grad_(case.backward) for tensor in tensors.values()]
        try:
            self.seconds()
        except RuntimeError as error:
            raise Unsupported(str(error).splitlines()[0]) from error

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
        """Return out and dq."""
        found = {"out": self._out}
        if self._case.backward:
            found["dq"] = self._leaves[0].grad
        return {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}


def contenders(dtype: str) -> list[Callable[[], Contender]]:
    """Return what makes the contenders of a dtype, ours first; torch's flash and cuDNN take 16 bits only."""
    backends = (EFFICIENT, MATH) if dtype == "float32" else (FLASH, CUDNN)

    def made_by(backend: str) -> Callable[[], Contender]:
        return lambda: Torch(backend)

    return [Ringmpi, *map(made_by, backends)]
