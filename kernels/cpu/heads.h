// What happens to single rows and heads: norms, rotation, and where keys and values lie.
#pragma once

#include "product.h"

// Root-mean-square norm of x [size], a multiple of 16, times weight → out.
template <class Out>
INLINE void norm(const float* x, const float* weight, int size, float eps, Out* out) {
  f32x16 squares = zero();
  for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  f32x16 scale = spread(1.0f / __builtin_sqrtf(sum(squares) / size + eps));
  for (int i = 0; i < size; i += LANES)
    store_narrow(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

template <class T>
void norm_rows(const float* x, const float* weight, int num_rows, int size, float eps, T* out) {
  constexpr int GROUP = 8;
  auto rows = [=](int item) {
    int end = (item + 1) * GROUP < num_rows ? (item + 1) * GROUP : num_rows;
    for (int r = item * GROUP; r < end; r++)
      norm(x + (size_t)r * size, weight, size, eps, out + (size_t)r * size);
  };
  share(rows, div_up(num_rows, GROUP));
}

// Rotates head [dim] in place: each element by its partner's angle. The pairs are the halves'
// elements or neighbours; `sin` is negative for the first of each.
INLINE void rotate(float* head, const float* cos, const float* sin, int dim, bool is_interleaved) {
  int half = dim / 2;
  for (int i = 0; i < half; i++) {
    int a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
    float first = head[a], second = head[b];
    head[a] = first * cos[a] + second * sin[a];
    head[b] = second * cos[b] + first * sin[b];
  }
}

// The KV cache of one layer: block by block [2, num_kv_heads, block_size / 16, 16 · head_dim].
// Sixteen keys are a tile of a packed matrix that queries are multiplied with; the values of
// sixteen positions are head_dim / 16 such tiles, that the weights of attention are multiplied
// with.
template <class T>
struct Cache {
  T* blocks;
  int block_size, num_kv_heads, head_dim;

  size_t tile_size() const { return (size_t)LANES * head_dim; }
  size_t head_size() const { return (size_t)block_size * head_dim; }
  T* keys(int64_t block, int head, int tile) const {
    return blocks + (block * 2 * num_kv_heads + head) * head_size() + tile * tile_size();
  }
  T* values(int64_t block, int head, int tile) const {
    return keys(block, num_kv_heads + head, tile);
  }

  // key and value [head_dim] go to kv_slot = block · block_size + offset. `is_last`: what follows
  // holds nothing yet, and its partner in a pair must not be NaN when it is multiplied by 0.
  void write(int64_t kv_slot, int head, const float* key, const float* value, bool is_last) const {
    int64_t block = kv_slot / block_size;
    int offset = kv_slot % block_size, lane = offset % LANES;
    T* to = keys(block, head, offset / LANES);
    for (int i = 0; i < head_dim; i++)
      narrow(key[i], to + (i / DEPTH<T> * LANES + lane) * DEPTH<T> + i % DEPTH<T>);
    to = values(block, head, offset / LANES) + lane / DEPTH<T> * LANES * DEPTH<T> + lane % DEPTH<T>;
    bool fills = is_last && lane % DEPTH<T> + 1 < DEPTH<T>;
    for (int i = 0; i < head_dim; i++) {
      T* at = to + i / LANES * LANES * LANES + i % LANES * DEPTH<T>;
      narrow(value[i], at);
      if (fills) narrow(0.0f, at + 1);
    }
  }
};
