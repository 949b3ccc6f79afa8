"""Damage on the way is noticed: by the receiver, whatever the method, the pass and the payload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mpi4py import MPI
from sharded import (
    OTHER_WAYS,
    SOME_WAYS,
    Check,
    Problem,
    Way,
    both_passes,
    gradients_of,
    make,
    random_tensors,
)

from ringmpi.comm.exchange import Exchange
from ringmpi.errors import StalledRingError, TransportError
from ringmpi.schedule import Pass
from ringmpi.schedule.steps import RESULTS, Direction, Payload, Transfer

pytestmark = pytest.mark.mpi

PROBLEM = Problem(40, 0, "zigzag", "causal", dtype="float32")

#: What travels in each pass.
PAYLOADS: dict[str, tuple[set[Payload], set[Payload]]] = {
    "ring": ({Payload.KV}, {Payload.KV, Payload.DKV}),
    "bidirectional": ({Payload.KV}, {Payload.KV, Payload.DKV}),
    "double-ring": ({Payload.KV}, {Payload.KV, Payload.DKV}),
    "allgather": ({Payload.KV}, {Payload.KV, Payload.DKV}),
    "passq": ({Payload.Q, Payload.STATE}, {Payload.QDOUT, Payload.DQ}),
    "ulysses": (
        {Payload.Q, Payload.KV, Payload.OUT},
        {Payload.QDOUT, Payload.KV, Payload.DQ, Payload.DKV},
    ),
}
PAYLOADS["hybrid"] = PAYLOADS["ulysses"]


@pytest.mark.parametrize("way", SOME_WAYS, ids=str)
def test_one_flipped_bit_in_any_transfer_is_noticed(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Every part that arrives is damaged, compared, and mended, so that the pass goes on."""
    compare = Exchange._compare_checksum
    noticed: list[set[Payload]] = [set(), set()]
    wrong: list[str] = []
    which = [0]

    def damage(self: Exchange, flight: Any) -> None:
        transfer: Transfer = flight.transfer
        if transfer.direction is Direction.RECEIVE:
            data = self.slot(transfer.part, transfer.slot)
            place = self._step * 37 % len(data)
            data[place] ^= 1
            try:
                compare(self, flight)
                wrong.append(f"{transfer.part}: not noticed")
            except TransportError as error:
                told = (
                    f"{transfer.part} came damaged from rank {transfer.peer} in step {self._step - 1}"
                )
                if not str(error).startswith(told):
                    wrong.append(f"{error} is not {told}")
                noticed[which[0]].add(transfer.part.payload)
            data[place] ^= 1
        compare(self, flight)

    monkeypatch.setattr(Exchange, "_compare_checksum", damage)
    with make(comm, way, PROBLEM, check_transfers=True) as attention:
        mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
        out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
        which[0] = 1
        gradients_of(attention, mine, out, lse)
    collective_assert(not wrong, wrong)
    expected = list(PAYLOADS[way.method])
    collective_assert(comm.size == 1 or noticed == expected, f"{noticed} and not {expected}")
    collective_assert(comm.size > 1 or noticed == [set(), set()])


@contextmanager
def spoilt_between_hops(
    monkeypatch: pytest.MonkeyPatch, spoil: bool
) -> Iterator[tuple[list[Transfer], list[str]]]:
    """Flip a bit of an input on the rank that passes it on, after it came in good order."""
    spoilt: list[Transfer] = []
    told: list[str] = []
    start, compare = Exchange.start, Exchange._compare_checksum

    def spoil_and_start(self: Exchange, transfers: tuple[Transfer, ...]) -> None:
        for transfer in transfers:
            passed_on = transfer.part.owner != self._comm.rank and transfer.part.payload not in RESULTS
            if transfer.direction is Direction.SEND and passed_on and spoil and not spoilt:
                self.slot(transfer.part, transfer.slot)[5] ^= 64
                spoilt.append(transfer)
        start(self, transfers)

    def note(self: Exchange, flight: Any) -> None:
        try:
            compare(self, flight)
        except TransportError as error:
            told.append(str(error))
            # Passed on with the sum that it came with, as if nobody had looked.
            transfer = flight.transfer
            self._owners_sums[transfer.slot] = transfer.part, int(flight.note["checksum"][0])

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "start", spoil_and_start)
        patch.setattr(Exchange, "_compare_checksum", note)
        yield spoilt, told


@pytest.mark.ranks(least=3)
@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_damage_between_two_hops_is_noticed_by_the_owners_checksum(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """A rank spoils what it passes on. Its own checksum of that would be right, so the owner's goes along."""
    culprit = comm.size // 2
    for direction in Pass:
        with make(comm, way, PROBLEM, check_transfers=True) as attention:
            mine = PROBLEM.shards(comm, random_tensors(PROBLEM))
            if direction is Pass.BACKWARD:
                out, lse = attention.forward(mine["q"], mine["k"], mine["v"])
            with spoilt_between_hops(monkeypatch, comm.rank == culprit) as (spoilt, told):
                if direction is Pass.FORWARD:
                    attention.forward(mine["q"], mine["k"], mine["v"])
                else:
                    gradients_of(attention, mine, out, lse)
        passed_on = comm.bcast(spoilt, culprit)
        everything = comm.allgather(told)
        if not passed_on:  # All-to-alls go straight from the owner.
            collective_assert(way.method in ("ulysses", "hybrid") and not any(everything), everything)
            continue
        (transfer,) = passed_on
        words = f"{transfer.part} came damaged from rank {culprit}"
        collective_assert(any(words in text for text in everything[transfer.peer]), everything)
        others = [text for texts in everything for text in texts if str(transfer.part) not in text]
        collective_assert(not others, others)


@pytest.mark.ranks(least=2)
def test_a_damaged_block_ends_the_pass(
    comm: MPI.Comm, collective_assert: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Exchange._compare_checksum

    def damage(self: Exchange, flight: Any) -> None:
        transfer: Transfer = flight.transfer
        if comm.rank == 0 and self._step == 1 and transfer.direction is Direction.RECEIVE:
            self.slot(transfer.part, transfer.slot)[17] ^= 1
        compare(self, flight)

    monkeypatch.setattr(Exchange, "_compare_checksum", damage)
    monkeypatch.setattr(
        "ringmpi.comm.watch.GRACE", 0.3
    )  # What the others do meanwhile is no matter here.
    last = comm.size - 1
    try:
        with make(comm, Way("ring"), PROBLEM, check_transfers=True, timeout=1.0) as attention:
            both_passes(attention, PROBLEM.shards(comm, random_tensors(PROBLEM)))
        message = ""
    except (TransportError, StalledRingError) as error:
        message = str(error)
    told = f"kv of {last} came damaged from rank {last} in step 0"
    collective_assert(comm.rank != 0 or told in message, message)
