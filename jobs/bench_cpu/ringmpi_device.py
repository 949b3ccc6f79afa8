"""Contenders `native`, `native-unsliced`, `native-exact` and `numpy`: one device and one block.

The second one takes no breaks in which a ring would call MPI; the last two round no weights.

Usage: ringmpi_device.py ADDRESS DEVICE THREADS WEIGHTS
"""

from __future__ import annotations

import sys

import numpy as np

import ringmpi
from case import Array, Case
from ringmpi import devices
from ringmpi.devices import Block, Device, Gradients, Outcome, Queries, Work, native
from ringmpi.encoding import numpy_dtype
from ringmpi.mask import Mask
from ringmpi.softmax import State, state_dtype
from worker import Job, serve

#: Seconds of a slice that no block here fills.
UNSLICED_S = 3600.0


class DeviceJob(Job):
    """Attention of one block on one device."""

    def __init__(self, case: Case, device: str, threads: int, weights: str) -> None:
        self.case = case
        self.dtype = numpy_dtype(case.dtype)
        weights = "exact" if case.dtype == "float32" else weights
        self.device = make(device, Mask(case.causal), case.head_dim**-0.5, threads, weights)
        positions = np.arange(case.seq_len)
        tensors = {name: array.astype(self.dtype) for name, array in case.inputs().items()}
        self.queries = Queries(tensors["q"], positions)
        self.block = Block(tensors["k"], tensors["v"], positions)
        self.dout = tensors["dout"]

    def run(self) -> tuple[Array, ...]:
        """Attend, and go back if asked to."""
        device, shape = self.device, self.queries.q.shape
        held = state_dtype(self.dtype)
        state = State.identity(shape, held)
        complete(device.attend(self.queries, self.block, state))
        out, lse = device.finish(state, self.dtype)
        if not self.case.backward:
            return (out,)
        gradients = Gradients(*(np.zeros(shape, held) for _ in range(3)))
        outcome = Outcome(self.dout, lse, device.delta(self.dout, out))
        complete(device.attend_backward(self.queries, outcome, self.block, gradients))
        rounded = (gradients.dq, gradients.dk, gradients.dv)
        return out, *(each.astype(self.dtype, copy=False) for each in rounded)

    def outputs(self, result: tuple[Array, ...]) -> dict[str, Array]:
        """Return the results by name."""
        return {
            name: array.astype(np.float32)
            for name, array in zip(self.case.tensors, result, strict=True)
        }


def make(name: str, mask: Mask, softmax_scale: float, threads: int, weights: str) -> Device:
    """Return a device; the threads of NumPy are those of its BLAS, which the environment sets."""
    if name == "numpy":
        return devices.make_device(name, mask, softmax_scale)
    if name == "native-unsliced":
        native.SLICE_S = UNSLICED_S
    weights = "exact" if name == "native-exact" else weights
    return devices.make_device("native", mask, softmax_scale, threads, weights=weights)


def complete(work: Work) -> None:
    """Do all of some work."""
    while not work.advance():
        pass


if __name__ == "__main__":
    address, name, threads, weights = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    facts = {"ringmpi": ringmpi.__version__, "numpy": np.__version__}
    if name != "numpy":
        missing = ringmpi.prepare()
        if missing is not None:
            sys.exit(missing)
        facts["native device"] = dict(devices.native_facts())["native"]
    serve(address, lambda case, _: DeviceJob(case, name, threads, weights), facts)
