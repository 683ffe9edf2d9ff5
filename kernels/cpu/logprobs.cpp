// Logprobs of rows of logits, called with ctypes: see kernels/cpu/sampler.py for the arguments and
// kernels/logprobs for the definition.

#include "pool.h"
#include "select.h"

namespace {

int compare(const void* a, const void* b) {
  uint64_t one = *(const uint64_t*)a, other = *(const uint64_t*)b;
  return one < other ? -1 : one > other;
}

// Ids of the k highest of x [n], descending, ties by lowest id. `spare` [4 · padded(n)].
void find_highest(const float* x, int n, int k, float* spare, int32_t* ids) {
  float kth = kth_highest(x, n, k, spare);
  uint64_t* higher = (uint64_t*)spare;  // sort keys: descending value, then ascending id
  int32_t* equals = (int32_t*)(higher + k);
  int num_higher = 0, num_equals = 0;
  each(x, n, NAN, [&](int i, f32x16 now) {
    uint32_t mask = at_least(now, spread(kth)), words[LANES];
    if (!mask) return;
    store(words, order(now));
    each_lane(mask, [&](int lane) {
      if (x[i + lane] > kth)
        higher[num_higher++] = (uint64_t)~words[lane] << 32 | (i + lane);
      else if (num_equals < k)
        equals[num_equals++] = i + lane;
    });
  });
  qsort(higher, num_higher, sizeof(uint64_t), compare);
  for (int j = 0; j < k; j++)  // NaN fails all comparisons, so fewer may be found
    ids[j] = j < num_higher                ? (int32_t)higher[j]
             : j < num_higher + num_equals ? equals[j - num_higher]
                                           : 0;
}

struct RowsJob {
  const float* logits;
  int n;
  const int64_t *rows, *tokens;  // logits row and id of each scored token
  int num_top;                   // negative: the whole vocabulary
  bool finds;                    // else `top_ids` has the wanted ids
  float* values;                 // [.., 1 + num_top or 1 + n]
  int32_t *top_ids, *ranks;      // [.., num_top], [..]

  void operator()(int index) {
    const float* x = logits + (size_t)rows[index] * n;
    const f32x16 own = spread(x[tokens[index]]);
    f32x16 top = spread(x[0]);
    int rank = 1;
    each(x, n, -INFINITY, [&](int, f32x16 now) {
      top = max(top, now);
      rank += __builtin_popcount(above(now, own));
    });
    ranks[index] = rank;
    float log_sum = highest(top) + log_of((float)sum_exp(x, n, highest(top), -INFINITY, nullptr));
    float* to = values + (size_t)index * (1 + (num_top < 0 ? n : num_top));
    *to++ = x[tokens[index]] - log_sum;
    if (num_top < 0) {
      each(x, n, 0, [&](int i, f32x16 now) {
        store_some(to + i, sub(now, spread(log_sum)), n - i < LANES ? n - i : LANES);
      });
    } else if (num_top > 0) {
      int32_t* ids = top_ids + (size_t)index * num_top;
      if (finds) find_highest(x, n, num_top, scratch(n), ids);
      for (int j = 0; j < num_top; j++) to[j] = x[ids[j]] - log_sum;
    }
  }
};

}  // namespace

EXPORT void shoal_logprobs(const float* logits, int n, int num, const int64_t* rows,
                           const int64_t* tokens, int num_top, int finds, float* values,
                           int32_t* top_ids, int32_t* ranks) {
  RowsJob job = {logits, n, rows, tokens, num_top, finds != 0, values, top_ids, ranks};
  share(job, num);
}
