// One block as the units of work see it: rows of a KV head, their tensors, and which keys each may see.
//
// A row is a query of one of the heads that share a KV head: row = query * group + head in the group. So rows see ever later
// keys, a strip of them may mix heads, and few queries of many heads still fill the lanes.
#pragma once

#include <algorithm>

#include "conversion.h"
#include "task.h"

namespace ringmpi {

inline int64_t up_to_multiple(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

struct Problem {
    Task task;
    int64_t group; // query heads that read a KV head
    int64_t rows;  // of a KV head

    explicit Problem(const Task &given)
        : task(given), group(given.heads / given.kv_heads), rows(given.queries * (given.heads / given.kv_heads)) {}

    int64_t kv_head_count() const { return task.batch * task.kv_heads; } // over the batch

    // What a tensor of the block holds for a key of a KV head.
    template <class T> T *of_key(const Tensor &tensor, int64_t kv_head, int64_t key) const {
        const int64_t batch = kv_head / task.kv_heads, head = kv_head % task.kv_heads;
        return reinterpret_cast<T *>(tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
                                     key * tensor.token_stride);
    }
};

// Rows of the keys of a KV head, as they lie in the block or in a copy.
template <class Number> struct KeyRows {
    const Number *at;
    int64_t stride; // numbers

    const Number *from(int64_t key) const { return at + key * stride; }
};

template <class Number> KeyRows<Number> as_they_lie(const Problem &problem, const Tensor &tensor, int64_t kv_head) {
    return {problem.of_key<const Number>(tensor, kv_head, 0), tensor.token_stride / static_cast<int64_t>(sizeof(Number))};
}

// Some keys, from one up to another.
struct Keys {
    int64_t first, last;

    bool empty() const { return first >= last; }
    int64_t count() const { return last - first; }
};

} // namespace ringmpi
