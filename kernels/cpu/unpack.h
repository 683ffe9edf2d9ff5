// Values of quantized tiles: scaled in float32, or as pairs of bf16, before their sums are scaled.
#pragma once

#include "multiply.h"

// Type of rows and values in GEMMs with activations of T. bf16 without instructions for its pairs
// is widened before.
#if defined(__AVX512BF16__) || defined(SHOAL_TILES)
template <class T>
using Factor = T;
#else
template <class T>
using Factor = float;
#endif

// Decodes quantized values for activations of T, exact in T. each(place, f) calls f(k, values) for
// each k < CODES_DEPTH, with the values of all columns / UNIT.
template <class T, class C>
struct Decoder {
  static constexpr float UNIT = 1;
  template <class W>
  explicit Decoder(const Packed<W>&) {}
  template <class F>
  __attribute__((always_inline)) void each(const uint8_t* place, F f) const {
#pragma GCC unroll 8
    for (int k = 0; k < CODES_DEPTH; k++) f(k, load_wide((const C*)place + k * LANES));
  }
};
template <class T>
struct Decoder<T, fp8> {
  template <class W>
  explicit Decoder(const Packed<W>&) {}
  static constexpr float UNIT = 256;
  template <class F>
  __attribute__((always_inline)) void each(const uint8_t* place, F f) const {
#pragma GCC unroll 8
    for (int k = 0; k < CODES_DEPTH; k++) f(k, load_small((const fp8*)place + k * LANES));
  }
};
template <>
struct Decoder<float, nibble> {
  static constexpr float UNIT = 1;
  const CodeTable* table;
  explicit Decoder(const Packed<Grouped<nibble>>& w) : table(w.table) {}
  template <class F>
  __attribute__((always_inline)) void each(const uint8_t* place, F f) const {
    Codes codes = Codes::load(place);
#pragma GCC unroll 8
    for (int k = 0; k < CODES_DEPTH; k++) f(k, Codes::wide(codes, k, table));
  }
};
#ifdef __AVX512F__
template <>
struct Decoder<bf16, nibble> {
  static constexpr float UNIT = 1;
  const CodeTable* table;
  explicit Decoder(const Packed<Grouped<nibble>>& w) : table(w.table) {}
  template <class F>
  __attribute__((always_inline)) void each(const uint8_t* place, F f) const {
    Codes codes = Codes::load(place);
#pragma GCC unroll 4
    for (int k = 0; k < CODES_DEPTH; k += 2) {
      f32x16 pairs = _mm512_castsi512_ps(code_pairs(codes, k, table));
      f(k, first_of_pairs(pairs)), f(k + 1, second_of_pairs(pairs));
    }
  }
};
#else
template <>
struct Decoder<bf16, nibble> {
  static constexpr float UNIT = 1;
  ByteTable bytes;
  explicit Decoder(const Packed<Grouped<nibble>>& w) : bytes(ByteTable::of(w.table)) {}
  template <class F>
  __attribute__((always_inline)) void each(const uint8_t* place, F f) const {
    Codes codes = Codes::load(place);
    __m256 low[4], high[4];
    ByteTable::look_up(bytes, codes.low, low);
    ByteTable::look_up(bytes, codes.high, high);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      f32x16 pairs = {low[i], high[i]};
      f(2 * i, first_of_pairs(pairs)), f(2 * i + 1, second_of_pairs(pairs));
    }
  }
};
#endif

// Scales the values of a tile's columns from some k on, in units of `unit`. Without groups, the
// sums are scaled.
template <class W, bool HAS_ZEROS>
struct Scaling {
  Scaling() = default;
  Scaling(const Packed<W>&, float, int, int) {}
  __attribute__((always_inline)) f32x16 operator()(f32x16 values) const { return values; }
};
template <class C, bool HAS_ZEROS>
struct Scaling<Grouped<C>, HAS_ZEROS> {
  f32x16 scales, offsets;

  Scaling() = default;
  Scaling(const Packed<Grouped<C>>& w, float unit, int tile, int k) {
    f32x16 own = w.scales_at(tile, k);
    scales = mul(own, spread(unit));
    if (HAS_ZEROS) offsets = mul(own, sub(zero(), w.zeros_at(tile, k)));
  }
  __attribute__((always_inline)) f32x16 operator()(f32x16 values) const {
    return HAS_ZEROS ? fma(values, scales, offsets) : mul(values, scales);
  }
};

// Calls f(t, k, values) for TILES tiles from `tile` on and `depth` k from `from` on, with scaled
// values. Codes PART_DEPTH further are prefetched.
template <class T, int TILES, bool HAS_ZEROS, class W, class F>
INLINE void each_scaled(const Packed<W>& w, int tile, int from, int depth, F f) {
  typedef CodeOf<W> C;
  constexpr int BYTES = LANES * CODE_BITS<C> / 8;  // of one k
  const Decoder<T, C> decoder(w);
  const uint8_t* codes[TILES];
#pragma GCC unroll 4
  for (int t = 0; t < TILES; t++)
    codes[t] = (const uint8_t*)w.tiles + (tile + t) * Packed<fp8>::tile_size(w.k) / LANES * BYTES;
  int end = from + depth;
  for (int k = from; k < end;) {
    Scaling<W, HAS_ZEROS> scaling[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++)
      scaling[t] = Scaling<W, HAS_ZEROS>(w, decoder.UNIT, tile + t, k);
    int next = end;
    if constexpr (HAS_GROUPS<W>) next = (k | (w.group - 1)) + 1;  // a power of two
    for (int last = next < end ? next : end; k < last; k += CODES_DEPTH)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) {
        const uint8_t* place = codes[t] + (size_t)k * BYTES;
        for (int i = 0; i < CODES_DEPTH * BYTES; i += 64)
          __builtin_prefetch(place + PART_DEPTH * BYTES + i);
        decoder.each(place, [&](int i, f32x16 values) __attribute__((always_inline)) {
          f(t, k + i, scaling[t](values));
        });
      }
  }
}

// Values of a tile before scaling, as pairs of bf16.
template <class C>
void unpack(const Packed<Grouped<C>>& w, int index, int from, int depth, bf16* out) {
  const GroupedTile<C> tile = w.tile(index, from);
  if constexpr (CODE_BITS<C> == 4) {
    for (int i = 0; i < depth; i += CODES_DEPTH) {
      Codes codes = Codes::load(tile.codes + i / CODES_DEPTH * CODES_BYTES);
#pragma GCC unroll 4
      for (int step = 0; step < CODES_DEPTH; step += 2)
        store_pairs(out + (i + step) * LANES, codes, step, w.table);
    }
  } else {
    for (int i = 0; i < depth * LANES; i += 2 * LANES) store_pairs(out + i, tile.at(0) + i);
  }
}
inline void unpack(const Packed<int8_t>& w, int index, int from, int depth, bf16* out) {
  const int8_t* tile = w.tile(index, from);
  for (int i = 0; i < depth * LANES; i += 2 * LANES) store_pairs(out + i, tile + i);
}
// Dense values in float32.
inline void unpack(const Packed<bf16>& w, int index, int from, int depth, float* out) {
  const bf16* tile = w.tile(index, from);
  for (int k = 0; k < depth; k += 2) {
    f32x16 pairs = load((const float*)(tile + k * LANES));
    store(out + k * LANES, first_of_pairs(pairs));
    store(out + (k + 1) * LANES, second_of_pairs(pairs));
  }
}
