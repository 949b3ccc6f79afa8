// What Python hands over: one block, for the queries of a rank. Mirrored by ringmpi/devices/native.py.
#pragma once

#include <cstdint>

namespace ringmpi {

enum class Dtype : int32_t { float64, float32, float16, bfloat16 };

// A tensor [batch, heads, tokens, head_dim] or [batch, heads, tokens]; strides in bytes. The last axis is contiguous.
struct Tensor {
    char *data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t token_stride;
};

// What was done, for the tally.
struct Counts {
    int64_t computed_pairs;
    int64_t tiles;
    int64_t tiles_unmasked;
    int64_t tiles_skipped;
};

// Of the tensors, the forward pass has q k v acc row_max row_sum, the backward pass q k v dout lse delta dq dk dv. State,
// lse, delta and gradients are float64 for float64 and float32 for everything narrower.
struct Task {
    Tensor q, k, v;
    Tensor acc, row_max, row_sum;
    Tensor dout, lse, delta;
    Tensor dq, dk, dv;
    const int64_t *begin; // first visible key of each query, an index into the block
    const int64_t *end;   // one after its last; neither falls from one query to the next
    int64_t batch, heads, kv_heads, queries, keys, head_dim;
    double softmax_scale;
    Dtype dtype;
    int32_t backward;
    int32_t rounds_weights; // whether weights may be rounded to the dtype, where that makes products faster
};

} // namespace ringmpi
