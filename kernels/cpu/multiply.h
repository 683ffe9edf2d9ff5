// Sums of a block of rows and tiles in registers.
#pragma once

#include "packed.h"

// Register block: rows × tiles of accumulators, with the operands of one step.
#if defined(__AVX512BF16__)
constexpr int MAX_ROWS = 6, MAX_TILES = 4;
#elif defined(__AVX512F__)
constexpr int MAX_ROWS = 5, MAX_TILES = 4;
#else
constexpr int MAX_ROWS = 6, MAX_TILES = 1;
#endif
constexpr int MOST_TILES = 4;
// With few rows, AVX2 has registers for several tiles.
constexpr int most_tiles(int num_rows) {
  return MAX_TILES > 1 || num_rows > 2 ? MAX_TILES : MOST_TILES / num_rows;
}
// For quantized values: decoding takes registers.
constexpr int decoded_tiles(int num_rows) {
  return MAX_TILES > 1 ? (num_rows == 1 ? MOST_TILES : 2) : num_rows == 1 ? 2 : 1;
}
constexpr int PART_DEPTH = 128;  // elements of each column in a part of the tiles

template <int ROWS, int TILES>
INLINE void clear(f32x16 sums[ROWS][TILES]) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) sums[r][t] = zero();
}

// sums[row][tile] += Σ over k elements of row · tile. FETCHES: prefetches the next part of the
// tiles, at a distance of k. STEP: distance from DEPTH elements of a row to the next DEPTH
// elements, in multiples of DEPTH.
template <class T, int ROWS, int TILES, bool FETCHES = false, int STEP = 1, class W>
INLINE void multiply(const T* rows, size_t stride, const W* const* tiles, int k,
                     f32x16 sums[ROWS][TILES]) {
  typedef Operands<T, W> Op;
  for (int i = 0; i < k; i += Op::STEP_DEPTH) {
    if (FETCHES)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) __builtin_prefetch(tiles[t] + (size_t)(i + k) * LANES);
#pragma GCC unroll 2
    for (int part = 0; part < Op::PARTS; part++) {
      typename Op::Tile tile[TILES];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) tile[t] = Op::tile(tiles[t] + (size_t)i * LANES, part);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        typename Op::Shared shared = Op::shared(rows + r * stride + (size_t)i * STEP, part);
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) sums[r][t] = Op::dot(sums[r][t], tile[t], shared);
      }
    }
  }
}

template <int ROWS, int TILES>
INLINE void load_sums(f32x16 sums[ROWS][TILES], const float* from, size_t stride) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) sums[r][t] = load(from + r * stride + t * LANES);
}

// Tiles are adjacent in `out`.
template <int ROWS, int TILES>
INLINE void store_sums(const f32x16 sums[ROWS][TILES], float* out, size_t stride) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) store(out + r * stride + t * LANES, sums[r][t]);
}

template <int N>
struct Size {
  static constexpr int value = N;
};

// Calls f(Size<num_rows>, Size<num_tiles>), where 1 ≤ num_rows ≤ MAX_ROWS, 1 ≤ num_tiles ≤
// most_tiles(num_rows).
template <int ROWS, class F>
INLINE void with_tiles(int num_tiles, F f) {
  if constexpr (most_tiles(ROWS) >= 4) {
    if (num_tiles == 4) return f(Size<ROWS>(), Size<4>());
    if (num_tiles == 3) return f(Size<ROWS>(), Size<3>());
  }
  if constexpr (most_tiles(ROWS) >= 2) {
    if (num_tiles == 2) return f(Size<ROWS>(), Size<2>());
  }
  f(Size<ROWS>(), Size<1>());
}

template <class F>
INLINE void with_sizes(int num_rows, int num_tiles, F f) {
  if constexpr (MAX_ROWS >= 6) {
    if (num_rows == 6) return with_tiles<6>(num_tiles, f);
  }
  if constexpr (MAX_ROWS >= 5) {
    if (num_rows == 5) return with_tiles<5>(num_tiles, f);
  }
  switch (num_rows) {
    case 4:
      return with_tiles<4>(num_tiles, f);
    case 3:
      return with_tiles<3>(num_tiles, f);
    case 2:
      return with_tiles<2>(num_tiles, f);
    default:
      return with_tiles<1>(num_tiles, f);
  }
}
