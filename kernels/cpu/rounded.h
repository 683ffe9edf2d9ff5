// GEMM with rows quantized to eight bits, for weights with integer quantized values: sums are exact
// within a group, and one instruction (vpdpbusd) computes four products.
//
// Each group of a row has its own scale, max |x| / 127: a row's result does not depend on the other
// rows of its batch.
#pragma once

#include "product.h"

#if defined(__AVX512VNNI__)

template <>
constexpr bool CAN_ROUND<int8_t> = true;
template <>
constexpr bool CAN_ROUND<Grouped<int8_t>> = true;
template <>
constexpr bool CAN_ROUND<Grouped<nibble>> = true;

// Group size of rows for weights with one scale per output; grouped weights have their own group
// size.
constexpr int ROUNDED_GROUP = 128;
constexpr int ROUNDED_ROWS = 4, ROUNDED_DEPTH = 8;  // multiplied at a time

// Quantized rows [num, depth], with a scale and the sum of quantized values of each group.
struct RoundedRows {
  int8_t* codes;
  float* scales;
  int32_t* sums;
  int depth, group, num_groups;

  int end(int g) const { return (g + 1) * group < depth ? (g + 1) * group : depth; }
};

// Unsigned quantized values of a weight, four of a column in a word: one operand of vpdpbusd is
// unsigned. Row sums correct for the OFFSET.
template <class C>
struct Unsigned;

template <>
struct Unsigned<int8_t> {
  static constexpr int OFFSET = 128;
  const uint8_t* codes;  // [k][LANES]

  __attribute__((always_inline)) __m512i half(int half) const {
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i found = _mm512_loadu_si512(codes + half * 4 * LANES);
    found = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, found), bytes);
    return _mm512_xor_si512(found, _mm512_set1_epi8((char)0x80));
  }
  INLINE Unsigned at(const uint8_t* tile, int k) { return {tile + k * LANES}; }
  INLINE __m128i in_order(__m128i row) { return row; }
};

template <>
struct Unsigned<nibble> {
  static constexpr int OFFSET = 8;
  __m512i words;

  __attribute__((always_inline)) __m512i half(int half) const {
    return _mm512_and_si512(_mm512_srli_epi16(words, 4 * half), _mm512_set1_epi8(15));
  }
  INLINE Unsigned at(const uint8_t* tile, int k) {
    return {_mm512_loadu_si512(tile + k / CODES_DEPTH * CODES_BYTES)};
  }
  // Orders a row's elements like code_shift the elements of a column.
  INLINE __m128i in_order(__m128i row) {
    return _mm_shuffle_epi8(row,
                            _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  }
};

// Quantizes k elements of `row`, group by group. NaN or an infinity makes the scale NaN.
template <class C, class T>
INLINE void round_row(const T* from, int k, int row, const RoundedRows& x) {
  int8_t* codes = x.codes + (size_t)row * x.depth;
  for (int g = 0; g < x.num_groups; g++) {
    int start = g * x.group, end = x.end(g) < k ? x.end(g) : k;
    f32x16 largest = zero(), total = zero();
    for (int i = start; i < end; i += LANES) {
      f32x16 some = load_wide(from + i);
      largest = max(largest, max(some, sub(zero(), some)));
      total = add(total, some);
    }
    float most = highest(largest);
    f32x16 factor = spread(most > 0 ? 127.0f / most : 0.0f);
    __m512i sums = _mm512_setzero_si512();
    for (int i = start; i < x.end(g); i += LANES) {
      __m512i whole = _mm512_setzero_si512();
      if (i < end) whole = _mm512_cvtps_epi32(mul(load_wide(from + i), factor));
      sums = _mm512_add_epi32(sums, whole);
      _mm_storeu_si128((__m128i*)(codes + i), Unsigned<C>::in_order(_mm512_cvtsepi32_epi8(whole)));
    }
    x.scales[(size_t)row * x.num_groups + g] = most / 127.0f + 0.0f * sum(total);
    x.sums[(size_t)row * x.num_groups + g] = _mm512_reduce_add_epi32(sums);
  }
}

// out [ROWS, TILES · LANES] += rows from `row` on · tiles from `tile` on, over the groups first …
// last − 1.
template <int ROWS, int TILES, class W>
INLINE void multiply_rounded(const RoundedRows x, int row, const Packed<W> w, int tile, int first,
                             int last, float* __restrict out, size_t stride) {
  typedef CodeOf<W> C;
  typedef Unsigned<C> Op;
  const size_t tile_bytes = Packed<int8_t>::tile_size(w.k) * CODE_BITS<C> / 8;
  const uint8_t* tiles = (const uint8_t*)w.tiles + tile * tile_bytes;
  const int8_t* codes = x.codes + (size_t)row * x.depth;
  const size_t depth = x.depth, num_groups = x.num_groups;
  const float* scales = x.scales + row * num_groups;
  const int32_t* totals = x.sums + row * num_groups;
  for (int g = first; g < last; g++) {
    __m512i found[ROWS][TILES];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++)
        found[r][t] = _mm512_set1_epi32(-Op::OFFSET * totals[r * num_groups + g]);
    for (int i = g * x.group; i < x.end(g); i += ROUNDED_DEPTH) {
      Op own[TILES];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) own[t] = Op::at(tiles + t * tile_bytes, i);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m512i four[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) four[t] = own[t].half(half);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          int word;
          memcpy(&word, codes + r * depth + i + 4 * half, 4);
          __m512i shared = _mm512_set1_epi32(word);
#pragma GCC unroll 4
          for (int t = 0; t < TILES; t++) {
            __m512i sum = found[r][t];
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(four[t]), "v"(shared));
            found[r][t] = sum;
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      f32x16 own, zeros;
      if constexpr (HAS_GROUPS<W>) {
        own = w.scales_at(tile + t, g * x.group);
        zeros = w.has_zeros ? w.zeros_at(tile + t, g * x.group) : zero();
      }
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        f32x16 wide = _mm512_cvtepi32_ps(found[r][t]);
        f32x16 scale = spread(scales[r * num_groups + g]);
        float* place = out + r * stride + t * LANES;
        if constexpr (HAS_GROUPS<W>) {
          if (w.has_zeros) wide = fma(zeros, spread(-(float)totals[r * num_groups + g]), wide);
          scale = mul(scale, own);
        }
        store(place, fma(wide, scale, load(place)));
      }
    }
  }
}

template <class W>
void rounded_block(int num_rows, int num_tiles, const RoundedRows& x, int row, const Packed<W>& w,
                   int tile, int first, int last, float* out, size_t stride) {
  with_sizes(num_rows, num_tiles, [&](auto num_rows, auto num_tiles) {
    if constexpr (num_rows.value <= ROUNDED_ROWS)
      multiply_rounded<num_rows.value, num_tiles.value>(x, row, w, tile, first, last, out, stride);
  });
}

// rows [num_rows, w.k], quantized, times w: see Product.
template <class T, class W, class Out>
struct RoundedProduct {
  typedef CodeOf<W> C;

  const T* rows;
  int num_rows;
  Packed<W> w;
  Out out;
  RoundedRows x = {};
  Items items = {};

  RoundedProduct(const T* rows, int num_rows, Packed<W> w, Out out)
      : rows(rows), num_rows(num_rows), w(w), out(out) {
    x.group = ROUNDED_GROUP;
    if constexpr (HAS_GROUPS<W>) x.group = w.group;
    x.num_groups = div_up(w.k, x.group);
    x.depth = div_up(w.k, PACKED_DEPTH) * PACKED_DEPTH;
  }

  size_t room() const {
    return (size_t)num_rows * (x.depth + x.num_groups * (sizeof(float) + sizeof(int32_t)));
  }
  void take_room(uint8_t* memory) {
    x.codes = (int8_t*)memory;
    x.scales = (float*)(memory + (size_t)num_rows * x.depth);
    x.sums = (int32_t*)(x.scales + (size_t)num_rows * x.num_groups);
  }
  int num_parts() const { return num_rows; }
  void prepare(int row) const { round_row<C>(rows + (size_t)row * w.k, w.k, row, x); }
  void divide(int unit, int total) {
    items = Items(num_rows, w.num_tiles(), FEW_ROWS, unit, total);
  }

  // Runs all passes of rows over one part of the tiles, then over the next part.
  void operator()(int item) {
    alignas(64) float sums[FEW_ROWS][MAX_TILES * LANES] = {};
    Items::Part part = items.part(item);
    int num_parts = PART_DEPTH / x.group;
    for (int first = 0; first < x.num_groups; first += num_parts) {
      int last = first + num_parts < x.num_groups ? first + num_parts : x.num_groups;
      for (int row = part.start; row < part.end;) {
        int num = div_up(part.end - row, div_up(part.end - row, ROUNDED_ROWS));
        rounded_block(num, part.num_tiles, x, row, w, part.tile, first, last,
                      sums[row - part.start], MAX_TILES * LANES);
        row += num;
      }
    }
    for (int row = part.start; row < part.end; row++)
      out(row, part.tile, part.num_tiles, sums[row - part.start]);
  }
};

#else

template <class T, class W, class Out>
struct RoundedProduct;

#endif

template <class T, class W, class Out>
void run_product(const T* rows, int num_rows, Packed<W> w, Out out, int unit = 1) {
  if constexpr (CAN_ROUND<W>)
    if (w.rounds) return run_items(RoundedProduct<T, W, Out>{rows, num_rows, w, out}, unit);
  run_items(Product<T, W, Out>{rows, num_rows, w, out}, unit);
}

template <class T, class W>
void product(const T* rows, int num_rows, Packed<W> w, float* out) {
  run_product(rows, num_rows, w, Store<W>{out, w});
}

template <class T, class W>
void add_product(const T* rows, int num_rows, Packed<W> w, float scale, float* out) {
  run_product(rows, num_rows, w, Add<W>{out, w, scale});
}

template <class T, class W>
void gated_product(const T* rows, int num_rows, Packed<W> w, float alpha, float beta,
                   const Deltas& deltas, T* out) {
  run_product(rows, num_rows, w, Gate<T, W>{out, w, alpha, beta, 0, deltas}, 2);
}
