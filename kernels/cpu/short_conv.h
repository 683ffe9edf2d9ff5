// Gated short convolutions over a paged cache: see kernels/short_conv/__init__.py for the formula.
#pragma once

#include "attention.h"

struct ShortConv {
  int32_t num_parts, part, width;  // a token has `part` channels in each of `num_parts` caches
  const float* weight;             // [width, size]
  const float* bias;               // [size] or null
};

// The columns of tokens, each in the caches of several seats.
template <class T>
struct ColumnCache {
  void* const* caches;
  const BlockStrides* strides;
  int block_size, part;

  T* at(int64_t block, int offset, int channel) const {
    int number = channel / part;
    T* entries = (T*)caches[number] + block * strides[number].entries;
    return entries + (size_t)offset * part + channel % part;
  }
};

// x [num, 3 · size]: the gates b and c, and the inputs u. Writes b · u of all tokens, then out
// [num, size].
template <class T>
void run_short_conv(const ShortConv& conv, ColumnCache<T> cache, const Rows& rows,
                    const int64_t* slot_mapping, const float* x, int num, int size, T* out) {
  int block_size = cache.block_size;
  each_row(num, 3 * size, [=](size_t at) {
    const float *b = x + at, *u = b + 2 * size;
    int64_t slot = slot_mapping[at / (3 * size)];
    for (int i = 0; i < size; i += LANES)
      store_narrow(cache.at(slot / block_size, slot % block_size, i),
                   mul(load(b + i), load(u + i)));
  });
  each_row(num, size, [=, &conv, &rows](size_t at) {
    int t = at / size, row = row_of(rows, t);
    int64_t position = rows.num_keys[row] - (rows.starts[row + 1] - t);
    const int64_t* table = rows.tables + (size_t)row * rows.table_stride;
    const float* c = x + 3 * at + size;
    for (int i = 0; i < size; i += LANES) {
      f32x16 total = conv.bias ? load(conv.bias + i) : zero();
      for (int j = 0; j < conv.width; j++) {
        int64_t seen = position - (conv.width - 1 - j);
        if (seen < 0) continue;
        const T* entry = cache.at(table[seen / block_size], seen % block_size, i);
        total = fma(load(conv.weight + (size_t)j * size + i), load_wide(entry), total);
      }
      store_narrow(out + at + i, mul(load(c + i), total));
    }
  });
}
