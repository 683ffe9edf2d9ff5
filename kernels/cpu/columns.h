// Columns of a packed matrix as floats: embeddings of a quantized table or of the LM head.
#pragma once

#include "matrix.h"

INLINE float lane_of(f32x16 x, int lane) {
  float each[LANES];
  store(each, x);
  return each[lane];
}

// Sixteen quantized values of a tile's column from k on, as floats, before zero point and scale.
template <class C>
INLINE f32x16 column_numbers(const Packed<Grouped<C>>&, const C* tile, int lane, int k) {
  C codes[LANES];
  for (int i = 0; i < LANES; i++) codes[i] = tile[(size_t)(k + i) * LANES + lane];
  return load_wide(codes);
}
INLINE f32x16 column_numbers(const Packed<Grouped<nibble>>& w, const nibble* tile, int lane,
                             int k) {
  float numbers[LANES];
  for (int i = 0; i < LANES; i++) {
    const uint8_t* word = (const uint8_t*)tile + (k + i) / CODES_DEPTH * CODES_BYTES + lane * 4;
    int bit = code_shift((k + i) % CODES_DEPTH);
    numbers[i] = w.table->wide[word[bit / 8] >> bit % 8 & 15];
  }
  return load(numbers);
}

// Stores sixteen values, rounded to T.
template <class T>
INLINE void store_rounded(f32x16 numbers, float* out) {
  store(out, numbers);
  for (int i = 0; i < LANES; i++) {
    T rounded;
    narrow(out[i], &rounded);
    out[i] = widen(rounded);
  }
}

// A column of w → out [w.k], rounded to T as in a dense weight.
template <class T>
void unpack_column(const Packed<T>& w, int column, float* out) {
  const T* tile = w.tile(column / LANES) + column % LANES * DEPTH<T>;
  for (int i = 0; i < w.k; i++)
    out[i] = widen(tile[i / DEPTH<T> * LANES * DEPTH<T> + i % DEPTH<T>]);
}
template <class T>
void unpack_column(const Packed<int8_t>& w, int column, float* out) {
  const int8_t* tile = w.tile(column / LANES) + column % LANES;
  f32x16 scale = spread(w.scales[column]);
  for (int k = 0; k < w.k; k += LANES) {
    int8_t codes[LANES];
    for (int i = 0; i < LANES; i++) codes[i] = tile[(size_t)(k + i) * LANES];
    store_rounded<T>(mul(load_wide(codes), scale), out + k);
  }
}
template <class T, class C>
void unpack_column(const Packed<Grouped<C>>& w, int column, float* out) {
  int index = column / LANES, lane = column % LANES;
  const C* tile = (const C*)w.tile(index).codes;
  for (int k = 0; k < w.k; k += LANES) {
    f32x16 numbers = column_numbers(w, tile, lane, k);
    if (w.has_zeros) numbers = sub(numbers, spread(lane_of(w.zeros_at(index, k), lane)));
    store_rounded<T>(mul(numbers, spread(lane_of(w.scales_at(index, k), lane))), out + k);
  }
}
