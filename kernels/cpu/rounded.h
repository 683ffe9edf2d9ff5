// GEMM with rows quantized to eight bits, for weights with integer quantized values: sums are exact
// within a group.
//
// Each group of a row has its own scale, max |x| / 127: a row's result does not depend on the other
// rows of its batch.
#pragma once

#include "product.h"
#include "words.h"

template <>
inline constexpr bool CAN_ROUND<Grouped<nibble>> = true;
#ifdef __AVX512VNNI__  // without it, values of eight bits gain nothing
template <>
inline constexpr bool CAN_ROUND<int8_t> = true;
template <>
inline constexpr bool CAN_ROUND<Grouped<int8_t>> = true;
#endif

// Group size of rows for weights with one scale per output; grouped weights have their own group
// size.
constexpr int ROUNDED_GROUP = 128;
constexpr int ROUNDED_ROWS = MAX_TILES > 1 ? 4 : 6, ROUNDED_DEPTH = 16;  // multiplied at a time

// Quantized rows [num, depth], with a scale of each group, and the sum of its values · −OFFSET of
// the columns.
struct RoundedRows {
  int8_t* codes;
  float* scales;
  int32_t* offsets;
  int depth, stride, group, num_groups;

  int end(int g) const { return (g + 1) * group < depth ? (g + 1) * group : depth; }
};

// Words of four bytes or two 16-bit halves, one for each column of a side of a tile.
#ifdef __AVX512F__
typedef __m512i Words;

INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
INLINE Words each_word(int x) { return _mm512_set1_epi32(x); }
INLINE Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE Words add_halves(Words a, Words b) { return _mm512_add_epi16(a, b); }
// Sums of the products of adjacent bytes, unsigned ones of a and signed ones of b.
INLINE Words pair_products(Words a, Words b) { return _mm512_maddubs_epi16(a, b); }
INLINE Words sum_halves(Words a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
INLINE Words lower_nibbles(Words a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE Words upper_nibbles(Words a) { return lower_nibbles(_mm512_srli_epi16(a, 4)); }
#ifdef __AVX512VNNI__
// Adds the four products of each word, of unsigned bytes of a and signed ones of b.
INLINE Words add_dots(Words sum, Words a, Words b) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif
INLINE f32x16 to_float(const Words sides[1]) { return _mm512_cvtepi32_ps(sides[0]); }
INLINE u32x16 to_words(f32x16 x) { return _mm512_cvtps_epi32(x); }
INLINE int sum(u32x16 a) { return _mm512_reduce_add_epi32(a); }
INLINE __m128i to_bytes(u32x16 a) { return _mm512_cvtsepi32_epi8(a); }  // saturated
#else
typedef __m256i Words;

INLINE Words load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Words each_word(int x) { return _mm256_set1_epi32(x); }
INLINE Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
INLINE Words add_halves(Words a, Words b) { return _mm256_add_epi16(a, b); }
INLINE Words pair_products(Words a, Words b) { return _mm256_maddubs_epi16(a, b); }
INLINE Words sum_halves(Words a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
INLINE Words lower_nibbles(Words a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE Words upper_nibbles(Words a) { return lower_nibbles(_mm256_srli_epi16(a, 4)); }
INLINE f32x16 to_float(const Words sides[2]) {
  return {_mm256_cvtepi32_ps(sides[0]), _mm256_cvtepi32_ps(sides[1])};
}
INLINE u32x16 to_words(f32x16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
INLINE int sum(u32x16 a) {
  __m256i both = _mm256_add_epi32(a.low, a.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
INLINE __m128i to_bytes(u32x16 a) {
  __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
#endif
constexpr int SIDES = LANES * 4 / sizeof(Words);

// Products of a side of a tile's columns with a row. `load` decodes CODES_DEPTH values of each
// column, four of them in each half; they count OFFSET more. `in_order` orders sixteen elements of
// a row like them. A sum may have MOST_DEPTH products.
template <class C>
struct Dots;

template <>
struct Dots<nibble> {
  static constexpr int OFFSET = 8;

  INLINE void load(const uint8_t* codes, Words halves[2]) {
    Words words = load_words(codes);
    halves[0] = lower_nibbles(words), halves[1] = upper_nibbles(words);
  }
  // See code_shift.
  INLINE __m128i in_order(__m128i row) {
    return _mm_shuffle_epi8(row,
                            _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  }
#ifdef __AVX512VNNI__
  static constexpr int MOST_DEPTH = PART_DEPTH;
  INLINE Words add(Words sum, Words columns, Words row) { return add_dots(sum, columns, row); }
#else
  static constexpr int MOST_DEPTH = 32;  // 16 bits hold 8 sums of a pair, 8 · 15 · 127 · 2
  INLINE Words add(Words sum, Words columns, Words row) {
    return add_halves(sum, pair_products(columns, row));
  }
#endif
};

#ifdef __AVX512VNNI__
template <>
struct Dots<int8_t> {
  static constexpr int OFFSET = 128, MOST_DEPTH = PART_DEPTH;

  INLINE void load(const uint8_t* codes, Words halves[2]) {
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Words found = _mm512_permutexvar_epi32(words, load_words(codes + half * 4 * LANES));
      found = _mm512_shuffle_epi8(found, bytes);
      halves[half] = _mm512_xor_si512(found, _mm512_set1_epi8((char)0x80));
    }
  }
  INLINE __m128i in_order(__m128i row) { return row; }
  INLINE Words add(Words sum, Words columns, Words row) { return add_dots(sum, columns, row); }
};
#endif

// Quantizes k elements of `row`, group by group. NaN or an infinity makes the scale NaN.
template <class C, class T>
INLINE void round_row(const T* from, int k, int row, const RoundedRows& x) {
  int8_t* codes = x.codes + (size_t)row * x.stride;
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
    u32x16 sums = spread_word(0);
    for (int i = start; i < x.end(g); i += LANES) {
      u32x16 whole = spread_word(0);
      if (i < end) whole = to_words(mul(load_wide(from + i), factor));
      sums = plus(sums, whole);
      _mm_storeu_si128((__m128i*)(codes + i), Dots<C>::in_order(to_bytes(whole)));
    }
    x.scales[(size_t)row * x.num_groups + g] = most / 127.0f + 0.0f * sum(total);
    x.offsets[(size_t)row * x.num_groups + g] = -Dots<C>::OFFSET * sum(sums);
  }
}

// sums[row][tile] += products of one side of tiles from k = `start` to `end`.
template <int ROWS, int TILES, class C>
INLINE void add_products(const int8_t* codes, size_t stride, const uint8_t* tiles,
                         size_t tile_bytes, int start, int end, Words sums[ROWS][TILES]) {
  for (int i = start; i < end; i += ROUNDED_DEPTH)
#pragma GCC unroll 2
    for (int k = i; k < i + ROUNDED_DEPTH; k += CODES_DEPTH) {
      Words columns[TILES][2];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++)
        Dots<C>::load(tiles + t * tile_bytes + (size_t)k * LANES * CODE_BITS<C> / 8, columns[t]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          int word;
          memcpy(&word, codes + r * stride + k + 4 * half, 4);
          Words shared = each_word(word);
#pragma GCC unroll 4
          for (int t = 0; t < TILES; t++)
            sums[r][t] = Dots<C>::add(sums[r][t], columns[t][half], shared);
        }
    }
}

// The same for any depth: sums of halves are widened to words in time.
template <int ROWS, int TILES, class C>
INLINE void add_all_products(const int8_t* codes, size_t stride, const uint8_t* tiles,
                             size_t tile_bytes, int start, int end, Words sums[ROWS][TILES]) {
  constexpr int MOST = Dots<C>::MOST_DEPTH;
  if (MOST == PART_DEPTH)
    return add_products<ROWS, TILES, C>(codes, stride, tiles, tile_bytes, start, end, sums);
  for (int i = start; i < end; i += MOST) {
    Words halves[ROWS][TILES] = {};
    const int last = i + MOST < end ? i + MOST : end;
    add_products<ROWS, TILES, C>(codes, stride, tiles, tile_bytes, i, last, halves);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) sums[r][t] = add_words(sums[r][t], sum_halves(halves[r][t]));
  }
}

// out [ROWS, TILES · LANES] += rows from `row` on · tiles from `tile` on, over the groups first …
// last − 1.
template <int ROWS, int TILES, class W>
INLINE void multiply_rounded(const RoundedRows x, int row, const Packed<W> w, int tile, int first,
                             int last, float* __restrict out, size_t stride) {
  typedef CodeOf<W> C;
  const size_t tile_bytes = Packed<int8_t>::tile_size(w.k) * CODE_BITS<C> / 8;
  const uint8_t* tiles = (const uint8_t*)w.tiles + tile * tile_bytes;
  const int8_t* codes = x.codes + (size_t)row * x.stride;
  const size_t num_groups = x.num_groups;
  const float* scales = x.scales + row * num_groups;
  const int32_t* offsets = x.offsets + row * num_groups;
  for (int g = first; g < last; g++) {
    if constexpr (SIDES > 1) {
      constexpr int BYTES = LANES * CODE_BITS<C> / 8;
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++)
        for (int i = 0; i < x.group * BYTES; i += 64)
          __builtin_prefetch(tiles + t * tile_bytes + (g * x.group + PART_DEPTH) * BYTES + i);
    }
    Words found[ROWS][TILES][SIDES];
#pragma GCC unroll 2
    for (int side = 0; side < SIDES; side++) {
      Words sums[ROWS][TILES];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) sums[r][t] = each_word(offsets[r * num_groups + g]);
      add_all_products<ROWS, TILES, C>(codes, x.stride, tiles + side * sizeof(Words), tile_bytes,
                                       g * x.group, x.end(g), sums);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) found[r][t][side] = sums[r][t];
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
        f32x16 wide = to_float(found[r][t]);
        f32x16 scale = spread(scales[r * num_groups + g]);
        float* place = out + r * stride + t * LANES;
        if constexpr (HAS_GROUPS<W>) {
          float total = (float)offsets[r * num_groups + g] / Dots<C>::OFFSET;  // exact
          if (w.has_zeros) wide = fma(zeros, spread(total), wide);
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
    x.stride = x.depth | 64;
  }

  size_t room() const {
    return (size_t)num_rows * (x.stride + x.num_groups * (sizeof(float) + sizeof(int32_t)));
  }
  void take_room(uint8_t* memory) {
    x.codes = (int8_t*)memory;
    x.scales = (float*)(memory + (size_t)num_rows * x.stride);
    x.offsets = (int32_t*)(x.scales + (size_t)num_rows * x.num_groups);
  }
  int num_parts() const { return num_rows; }
  void prepare(int row) const { round_row<C>(rows + (size_t)row * w.k, w.k, row, x); }
  void divide(int unit, int total) {
    items = Items(num_rows, w.num_tiles(), FEW_ROWS, unit, total);
  }

  // Runs all passes of rows over one part of the tiles, then over the next part.
  void operator()(int item) {
    constexpr int STRIDE = MOST_TILES * LANES;
    alignas(64) float sums[FEW_ROWS][STRIDE] = {};
    Items::Part part = items.part(item);
    int num_parts = PART_DEPTH / x.group;
    for (int first = 0; first < x.num_groups; first += num_parts) {
      int last = first + num_parts < x.num_groups ? first + num_parts : x.num_groups;
      for (int row = part.start; row < part.end;) {
        int num = div_up(part.end - row, div_up(part.end - row, ROUNDED_ROWS));
        for (int t = 0; t < part.num_tiles; t += most_tiles(num)) {
          int num_left = part.num_tiles - t;
          int num_tiles = num_left < most_tiles(num) ? num_left : most_tiles(num);
          rounded_block(num, num_tiles, x, row, w, part.tile + t, first, last,
                        sums[row - part.start] + t * LANES, STRIDE);
        }
        row += num;
      }
    }
    for (int row = part.start; row < part.end; row++)
      out(row, part.tile, part.num_tiles, sums[row - part.start]);
  }
};

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

template <class T, class W>
void gelu_product(const T* rows, int num_rows, Packed<W> w, bool has_gates, T* out) {
  run_product(rows, num_rows, w, Gelu<T, W>{out, w, has_gates}, 1 + has_gates);
}
