"""What a run would take on a machine that is not here: the schedules of all ranks, priced step by step.

Every rank goes on by itself. Its step begins where the one before ended, and posts its transfers at once;
it ends when its attends are done and the transfers that are due have arrived. The rules:

* An attend takes ``flops / F``, with F at the geometric mean of its query and key tokens; masked pairs are
  free. Noise, slow ranks and delays change what a step's attends take.
* What one rank sends to another in one step, due in one step, is one *flow*. Alone it takes Hockney's
  ``latency + nbytes / bandwidth``, of which only the second part occupies links. The flows of a connection
  (from one rank to another) leave one after the other.
* A flow whose largest message is above the eager limit begins when both ends have posted it (rendezvous),
  and both ends are done with it when it has arrived. A smaller one leaves when its sender has posted it, and
  the sender is done with it then.
* Under ``poll`` and ``thread`` flows move by themselves. Under ``wait`` a flow above the eager limit moves
  only while both its ends wait at the end of a step: nobody else calls MPI, and MPI moves nothing unless
  called.
* All flows out of (into) a rank over one kind of link share ``total``, those of a node ``node_total``, those
  of a group what the topology lets through. Capacity is shared max-min fairly among connections, anew
  whenever a flow begins or ends (flow level, as in SimGrid).
* Copying, clearing, merging and finishing take no time; nor does posting, nor calling MPI for progress.
"""

from __future__ import annotations

#: Options of an experiment that a simulation heeds.
SIMULATED = (
    "seq_len",
    "query_len",
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "causal",
    "window",
    "documents",
    "layout",
    "method",
    "ulysses_degree",
    "inner",
    "backward",
    "progress",
    "link",
    "repeats",
    "seed",
    "chunk_limit",
    "ranks",
    "output",
)
