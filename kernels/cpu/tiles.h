// GEMM of bf16 on AMX. A register has sixteen rows of 64 bytes: 32 elements of each of sixteen left
// rows, or of sixteen columns in the layout of a packed matrix.
//
// Each sum runs over k in order, 32 at a time, independently of the other rows and columns.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "simd.h"

constexpr int AHEAD = 2 * 32;  // prefetch distance along k
constexpr int TILE_ROWS = 16, TILE_DEPTH = 32, TILE_BYTES = 64;

template <class T>
constexpr bool USES_TILES = false;
#ifdef SHOAL_TILES
template <>
inline constexpr bool USES_TILES<bf16> = true;
#endif

// Operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Compiler barrier: the compiler does not know the memory accesses of tile instructions.
INLINE void fence_tiles() { __asm__ volatile("" ::: "memory"); }

// Scope in which this thread treats subnormal numbers as zero, as AMX does.
class FlushedToZero {
 public:
  FlushedToZero() {
    _mm_setcsr(before_ | 0x8040);
    fence_tiles();
  }
  ~FlushedToZero() {
    fence_tiles();
    _mm_setcsr(before_);
  }

 private:
  unsigned before_ = _mm_getcsr();
};

#ifdef __AMX_BF16__

#define TILE_ZERO(to) _tile_zero(to)
#define TILE_LOAD(to, from, stride) _tile_loadd(to, from, stride)
#define TILE_STORE(from, to, stride) _tile_stored(from, to, stride)
#define TILE_DOT(sums, left, right) _tile_dpbf16ps(sums, left, right)
INLINE void load_shapes(const TileShapes& shapes) {
  fence_tiles();
  _tile_loadconfig(&shapes);
}
INLINE void release_tiles() { _tile_release(); }

#else  // emulation in plain C++, for tests on other machines

struct Tiles {
  TileShapes shapes;
  alignas(64) uint8_t rows[8][TILE_ROWS][TILE_BYTES];

  void load(int to, const void* from, size_t stride) {
    for (int r = 0; r < shapes.rows[to]; r++)
      memcpy(rows[to][r], (const uint8_t*)from + r * stride, shapes.row_bytes[to]);
  }
  void store(int from, void* to, size_t stride) const {
    for (int r = 0; r < shapes.rows[from]; r++)
      memcpy((uint8_t*)to + r * stride, rows[from][r], shapes.row_bytes[from]);
  }
  // Products of even and of odd elements have separate sums.
  void dot(int to, int left, int right) {
    FlushedToZero flushed;
    for (int r = 0; r < shapes.rows[to]; r++) {
      float* sums = (float*)rows[to][r];
      const bf16* own = (const bf16*)rows[left][r];
      for (int column = 0; column < LANES; column++) {
        float even = 0, odd = 0;
        for (int i = 0; i < shapes.rows[right]; i++) {
          const bf16* pair = (const bf16*)rows[right][i] + 2 * column;
          even = __builtin_fmaf(widen(own[2 * i]), widen(pair[0]), even);
          odd = __builtin_fmaf(widen(own[2 * i + 1]), widen(pair[1]), odd);
        }
        sums[column] += even + odd;
      }
    }
  }
};

static thread_local Tiles tiles;

#define TILE_ZERO(to) memset(tiles.rows[to], 0, sizeof tiles.rows[to])
#define TILE_LOAD(to, from, stride) tiles.load(to, from, stride)
#define TILE_STORE(from, to, stride) tiles.store(from, to, stride)
#define TILE_DOT(sums, left, right) tiles.dot(sums, left, right)
INLINE void load_shapes(const TileShapes& shapes) { tiles.shapes = shapes; }
INLINE void release_tiles() {}

#endif

// Left rows in AMX's layout: blocks of sixteen rows, 32 elements of each at a time, zero-padded
// along k.
struct TileRows {
  bf16* blocks;
  int num, k;

  static int depth(int k) { return (k + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; }
  bf16* block(int row) const { return blocks + (size_t)row * depth(k); }

  // Packs a block of rows [.., k] from `row` on.
  void pack(const bf16* rows, int row) const {
    bf16* to = block(row);
    int end = num - row < TILE_ROWS ? num : row + TILE_ROWS;
    for (int r = row; r < end; r++, to += TILE_DEPTH)
      for (int i = 0; i < k; i += TILE_DEPTH) {
        int left = k - i < TILE_DEPTH ? k - i : TILE_DEPTH;
        bf16* place = to + i * TILE_ROWS;
        memcpy(place, rows + (size_t)r * k + i, left * sizeof(bf16));
        if (left < TILE_DEPTH) memset(place + left, 0, (TILE_DEPTH - left) * sizeof(bf16));
      }
  }
};

// Sums of the even and of the odd of 32 products, which AMX keeps apart.
struct PairSums {
  f32x16 even, odd;
};

// Operands for two elements along k, as one instruction multiplies them; quantized tiles are not in
// pairs but [k][LANES].
#ifdef __AVX512BF16__
struct PairOperands : Operands<bf16> {
  INLINE Tile tile(const bf16* p) { return Operands<bf16>::tile(p, 0); }
  template <class C>
  INLINE Tile tile(const C* p) {
    return (__m512bh)widen_pairs(p);
  }
  INLINE Tile tile(Codes codes, int k, const CodeTable* table) {
    return (__m512bh)code_pairs(codes, k, table);
  }
  INLINE Shared shared(const bf16* p) { return Operands<bf16>::shared(p, 0); }
};
#else
struct PairOperands {
  struct Tile {
    f32x16 even, odd;
  };
  typedef Tile Shared;
  INLINE Tile tile(const bf16* p) { return {half_of_pairs(p, 0), half_of_pairs(p, 1)}; }
  template <class C>
  INLINE Tile tile(const C* p) {
    return {load_wide(p), load_wide(p + LANES)};
  }
  INLINE Tile tile(Codes codes, int k, const CodeTable* table) {
    bf16 pairs[2 * LANES];
    store_pairs(pairs, codes, k, table);
    return tile(pairs);
  }
  INLINE Shared shared(const bf16* p) { return {spread(widen(p[0])), spread(widen(p[1]))}; }
  INLINE f32x16 dot(f32x16 sum, Tile tile, Shared shared) {
    return fma(tile.odd, shared.odd, fma(tile.even, shared.even, sum));
  }
};
#endif

template <class C>
struct Operands<bf16, C> : PairOperands {
  static constexpr int STEP_DEPTH = 2, PARTS = 1;
  INLINE Tile tile(const C* p, int /* part */) { return PairOperands::tile(p); }
  INLINE Shared shared(const bf16* p, int /* part */) { return PairOperands::shared(p); }
};

// Two elements of a row, each with zero in the other's place.
struct Pair {
  PairOperands::Shared even, odd;
  float wide_even, wide_odd;

  explicit Pair(const bf16* row) : wide_even(widen(row[0])), wide_odd(widen(row[1])) {
    bf16 first[2] = {row[0], {0}}, second[2] = {{0}, row[1]};
    even = PairOperands::shared(first);
    odd = PairOperands::shared(second);
  }
};

INLINE void add_products(PairSums& sums, PairOperands::Tile tile, const Pair& row) {
  sums.even = PairOperands::dot(sums.even, tile, row.even);
  sums.odd = PairOperands::dot(sums.odd, tile, row.odd);
}
INLINE void add_products(PairSums& sums, const bf16* column, const Pair& row) {
  add_products(sums, PairOperands::tile(column), row);
}
INLINE void add_products(PairSums& sums, const int8_t* column, const Pair& row) {
  sums.even = fma(load_wide(column), spread(row.wide_even), sums.even);
  sums.odd = fma(load_wide(column + LANES), spread(row.wide_odd), sums.odd);
}

// Multiplies one row without AMX registers, which it would fill by a sixteenth. The sums have the
// same bits.
template <int TILES, class W>
void multiply_row(const bf16* row, int k, const W* const* w, float* out) {
  f32x16 sums[TILES];
  for (int t = 0; t < TILES; t++) sums[t] = zero();
  for (int start = 0; start < k; start += TILE_DEPTH) {
    PairSums found[TILES];
    for (int t = 0; t < TILES; t++) found[t] = {zero(), zero()};
    int end = start + TILE_DEPTH < k ? start + TILE_DEPTH : k;
    for (int i = start; i < end; i += 2) {
      Pair pair(row + i);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) add_products(found[t], w[t] + (size_t)i * LANES, pair);
    }
    for (int t = 0; t < TILES; t++) sums[t] = add(sums[t], add(found[t].even, found[t].odd));
  }
  for (int t = 0; t < TILES; t++) store(out + t * LANES, sums[t]);
}

// Multiplies up to 32 rows at a time; keeps the shapes of the registers from call to call.
class TileProduct {
 public:
  ~TileProduct() { release_tiles(); }

  // out [num, out_stride] = rows from `row` on · up to four packed tiles, adjacent in `out`, over
  // `depth` elements from k = `from` on. Returns the number of rows: all remaining ones, at most
  // 32.
  int run(const TileRows& x, int row, int num_tiles, const bf16* const* tiles, float* out,
          size_t out_stride, int from, int depth) {
    int left = x.num - row, num = left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS;
    size_t stride = out_stride * sizeof(float);
    const bf16* w[4];
    for (int t = 0; t < num_tiles; t++) w[t] = tiles[t] + (size_t)from * LANES;
    const bf16 *rows = x.block(row) + from * TILE_ROWS,
               *next_rows = rows + TILE_ROWS * x.depth(x.k);
    if (num <= TILE_ROWS) {
      shape(num, 0);
      few_rows(rows, depth, num_tiles, w, out, stride);
    } else {
      shape(TILE_ROWS, num - TILE_ROWS);
      for (int t = 0; t < num_tiles; t += 2)
        many_rows(rows, next_rows, depth, num_tiles - t, w + t, out + t * LANES, stride);
    }
    fence_tiles();
    return num;
  }

 private:
  // Registers: 0 … 3 have sums. With up to 16 rows, 4 has rows and 5 … 7 have columns; with more, 4
  // and 5 have rows, 6 and 7 columns.
  void shape(int first, int second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    int many[8] = {first, second, first, second, first, second, TILE_ROWS, TILE_ROWS};
    int few[8] = {first, first, first, first, first, TILE_ROWS, TILE_ROWS, TILE_ROWS};
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
      shapes.rows[i] = second ? many[i] : few[i];
      shapes.row_bytes[i] = TILE_BYTES;
    }
    load_shapes(shapes);
  }

  // Prefetches a step AHEAD along k: the CPU does not predict loads of tile registers.
  static void fetch(const bf16* w) {
    for (int row = 0; row < TILE_ROWS; row++)
      _mm_prefetch((const char*)(w + AHEAD * LANES) + row * TILE_BYTES, _MM_HINT_T0);
  }

  static void begin() {
    fence_tiles();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }

  static void few_rows(const bf16* rows, int k, int num_tiles, const bf16* const* w, float* out,
                       size_t stride) {
    begin();
    for (int i = 0; i < k; i += TILE_DEPTH) {
      TILE_LOAD(4, rows + i * TILE_ROWS, TILE_BYTES);
      fetch(w[0] + i * LANES);
      TILE_LOAD(5, w[0] + i * LANES, TILE_BYTES);
      TILE_DOT(0, 4, 5);
      if (num_tiles > 1) {
        fetch(w[1] + i * LANES);
        TILE_LOAD(6, w[1] + i * LANES, TILE_BYTES);
        TILE_DOT(1, 4, 6);
      }
      if (num_tiles > 2) {
        fetch(w[2] + i * LANES);
        TILE_LOAD(7, w[2] + i * LANES, TILE_BYTES);
        TILE_DOT(2, 4, 7);
      }
      if (num_tiles > 3) {
        fetch(w[3] + i * LANES);
        TILE_LOAD(5, w[3] + i * LANES, TILE_BYTES);
        TILE_DOT(3, 4, 5);
      }
    }
    TILE_STORE(0, out, stride);
    if (num_tiles > 1) TILE_STORE(1, out + LANES, stride);
    if (num_tiles > 2) TILE_STORE(2, out + 2 * LANES, stride);
    if (num_tiles > 3) TILE_STORE(3, out + 3 * LANES, stride);
  }

  // Takes the first two of `num_tiles` tiles.
  static void many_rows(const bf16* rows, const bf16* next_rows, int k, int num_tiles,
                        const bf16* const* w, float* out, size_t stride) {
    begin();
    for (int i = 0; i < k; i += TILE_DEPTH) {
      TILE_LOAD(4, rows + i * TILE_ROWS, TILE_BYTES);
      TILE_LOAD(5, next_rows + i * TILE_ROWS, TILE_BYTES);
      fetch(rows + i * TILE_ROWS);
      fetch(next_rows + i * TILE_ROWS);
      fetch(w[0] + i * LANES);
      TILE_LOAD(6, w[0] + i * LANES, TILE_BYTES);
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 5, 6);
      if (num_tiles > 1) {
        fetch(w[1] + i * LANES);
        TILE_LOAD(7, w[1] + i * LANES, TILE_BYTES);
        TILE_DOT(2, 4, 7);
        TILE_DOT(3, 5, 7);
      }
    }
    float* below = out + TILE_ROWS * stride / sizeof(float);
    TILE_STORE(0, out, stride);
    TILE_STORE(1, below, stride);
    if (num_tiles > 1) {
      TILE_STORE(2, out + LANES, stride);
      TILE_STORE(3, below + LANES, stride);
    }
  }

  int first_ = 0, second_ = 0;
};

// Memory that only grows; its contents are lost when it grows.
template <class N>
struct Scratch {
  N* memory = nullptr;
  size_t room = 0;

  N* of(size_t num) {
    if (num > room) {
      free(memory);
      memory = (N*)aligned_alloc(64, (num * sizeof(N) + 63) / 64 * 64);
      room = num;
    }
    return memory;
  }
};

inline thread_local Scratch<bf16> widened;  // quantized tiles of an item, in bf16
