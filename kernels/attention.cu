// What is launched on a GPU. Compiled by NVRTC for one dtype, one class of head sizes, one type of indices and one kind of unit;
// the host gives, with -D, what ringmpi/devices/launch.py chose:
//
//   RINGMPI_RAW                float, double, Float16 or BFloat16
//   RINGMPI_INDEX              int, or long long where offsets need it
//   RINGMPI_UNIT               Plain, or Tensor for 16-bit numbers from sm_80 on
//   RINGMPI_HEAD_SIZE          head_dim is at most this
//   RINGMPI_FORWARD_COLUMNS    keys of a tile; and of a tile of the backward pass, keys or queries:
//   RINGMPI_BACKWARD_COLUMNS
//   RINGMPI_ROUNDS_WEIGHTS     1 where the tensor unit rounds weights to 16 bits, 0 where it splits them
//
// Tensors are [batch, heads, tokens, head_dim], contiguous. Blocks of threads are counted in one dimension: tiles of rows, of all
// heads, of the batch. q, k, v and dout are Raw; all other tensors have the dtype of the state.

#include "backward.cuh"
#include "chores.cuh"
#include "forward.cuh"
#include "plain.cuh"
#include "tensor.cuh"

namespace ringmpi {

using Index = RINGMPI_INDEX;

using ForwardKernel = Forward<RINGMPI_UNIT<Raw, Index, RINGMPI_HEAD_SIZE, RINGMPI_FORWARD_COLUMNS, 1>>;
template <int OPERANDS> using BackwardUnit = RINGMPI_UNIT<Raw, Index, RINGMPI_HEAD_SIZE, RINGMPI_BACKWARD_COLUMNS, OPERANDS>;
using QueriesKernel = Backward<BackwardUnit<2>, RowSight, Summed::CHANGES>;
using KeysKernel = Backward<BackwardUnit<2>, ColumnSight, Summed::CHANGES>;
using ValuesKernel = Backward<BackwardUnit<1>, ColumnSight, Summed::WEIGHTS>;

constexpr int THREADS = BackwardUnit<1>::THREADS, ROWS = BackwardUnit<1>::ROWS;

// Which rows of which head this block of threads has.
struct Place {
    Index first; // row
    Index head;  // of all heads of the batch
    __device__ Place(Index rows) {
        const Index tiles = (rows + ROWS - 1) / ROWS;
        head = blockIdx.x / tiles;
        first = blockIdx.x % tiles * ROWS;
    }
};

} // namespace ringmpi

using namespace ringmpi;

// Of each query, the keys of the block that it may see: indices from begin up to end.
extern "C" __global__ void ringmpi_bounds(const Int64 *positions, Index queries, const Int64 *key_positions, Index keys,
                                          int causal, Int64 window, const Int64 *documents, int offsets, Index *begin,
                                          Index *end) {
    const Index query = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    Int64 first, last;
    interval({causal, window, documents, offsets}, positions[query], first, last);
    begin[query] = first_where(Index(0), keys, [&](Index at) { return key_positions[at] >= first; });
    end[query] = first_where(begin[query], keys, [&](Index at) { return key_positions[at] >= last; });
}

// Update the state of all queries. `group` query heads read one KV head.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ringmpi_forward(const Raw *q, const Raw *k, const Raw *v, State *acc, State *row_max, State *row_sum, const Index *begin,
                    const Index *end, Index queries, Index keys, int group, int head_dim, State scale) {
    const Place place(queries);
    const Index row = place.head * queries, kv_head = place.head / group;
    ForwardKernel::attend({q + row * head_dim, queries, head_dim}, {k + kv_head * keys * head_dim, keys, head_dim},
                          {v + kv_head * keys * head_dim, keys, head_dim}, begin, end, place.first, scale, acc + row * head_dim,
                          row_max + row, row_sum + row);
}

#define RINGMPI_BACKWARD(name, gradient)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                        \
        name(const Raw *q, const Raw *k, const Raw *v, const Raw *dout, const State *lse, const State *delta, State *gradient,  \
             const Index *begin, const Index *end, Index queries, Index keys, int group, int head_dim, State scale)

// Add to the gradient of all queries.
RINGMPI_BACKWARD(ringmpi_backward_q, dq) {
    const Place place(queries);
    const Index row = place.head * queries, kv_row = place.head / group * keys;
    using Rows = Rows<Raw, Index>;
    const Rows of_q{q + row * head_dim, queries, head_dim}, of_dout{dout + row * head_dim, queries, head_dim};
    const Rows of_k{k + kv_row * head_dim, keys, head_dim}, of_v{v + kv_row * head_dim, keys, head_dim};
    RowSight<BackwardUnit<2>> sight(begin, end, place.first, keys, 1, {lse + row, delta + row, queries});
    QueriesKernel::add(of_dout, of_q, of_v, of_k, sight, place.first, scale, scale, dq + row * head_dim);
}

// Add to the gradient of all keys.
RINGMPI_BACKWARD(ringmpi_backward_k, dk) {
    const Place place(keys);
    const Index kv_row = place.head * keys, row = place.head * group * queries;
    using Rows = Rows<Raw, Index>;
    const Rows of_q{q + row * head_dim, queries, head_dim}, of_dout{dout + row * head_dim, queries, head_dim};
    const Rows of_k{k + kv_row * head_dim, keys, head_dim}, of_v{v + kv_row * head_dim, keys, head_dim};
    ColumnSight<BackwardUnit<2>> sight(begin, end, place.first, keys, group, {lse + row, delta + row, queries});
    KeysKernel::add(of_v, of_k, of_dout, of_q, sight, place.first, scale, scale, dk + kv_row * head_dim);
}

// Add to the gradient of all values.
RINGMPI_BACKWARD(ringmpi_backward_v, dv) {
    const Place place(keys);
    const Index kv_row = place.head * keys, row = place.head * group * queries;
    using Rows = Rows<Raw, Index>;
    const Rows of_q{q + row * head_dim, queries, head_dim}, of_dout{dout + row * head_dim, queries, head_dim};
    const Rows of_k{k + kv_row * head_dim, keys, head_dim};
    ColumnSight<BackwardUnit<1>> sight(begin, end, place.first, keys, group, {lse + row, delta + row, queries});
    ValuesKernel::add(of_k, Rows{}, of_q, of_dout, sight, place.first, scale, State(1), dv + kv_row * head_dim);
}
