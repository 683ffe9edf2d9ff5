// Products of bf16 by AMX, whose registers hold sixteen rows of 64 bytes: of as many rows of the
// left operand 32 numbers each, or of sixteen columns 32 numbers each, which is how a packed matrix
// lies in memory.
//
// Each sum runs over k in order, 32 at a time, whatever rows and columns are computed beside it.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "simd.h"

constexpr int TILE_ROWS = 16, TILE_DEPTH = 32, TILE_BYTES = 64;

template <class T>
constexpr bool USES_TILES = false;
#ifdef SHOAL_TILES
template <>
constexpr bool USES_TILES<bf16> = true;
#endif

// What the registers hold, as the CPU wants to be told.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not know what memory these instructions read and write: nothing may be moved
// across.
INLINE void fence_tiles() { __asm__ volatile("" ::: "memory"); }

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

#else  // the same in plain C++, for tests on other machines

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
  // Products of the even and of the odd of 32 numbers are summed up on their own.
  void dot(int to, int left, int right) {
    for (int r = 0; r < shapes.rows[to]; r++) {
      float* sums = (float*)rows[to][r];
      const bf16* own = (const bf16*)rows[left][r];
      for (int column = 0; column < LANES; column++) {
        float even = 0, odd = 0;
        for (int i = 0; i < shapes.rows[right]; i++) {
          const bf16* pair = (const bf16*)rows[right][i] + 2 * column;
          even += widen(own[2 * i]) * widen(pair[0]);
          odd += widen(own[2 * i + 1]) * widen(pair[1]);
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

// Some rows of a left operand, and what of them lies behind the last 32 of k, filled up with zeros.
struct TileRows {
  const bf16* rows;
  size_t stride;  // bytes
  int num, k;
  alignas(64) bf16 rest[2 * TILE_ROWS][TILE_DEPTH];

  TileRows(const bf16* rows, int num, int k) : rows(rows), stride(k * 2), num(num), k(k) {
    int left = k % TILE_DEPTH;
    if (!left) return;
    memset(rest, 0, num * sizeof rest[0]);
    for (int r = 0; r < num; r++) memcpy(rest[r], rows + (size_t)r * k + k - left, left * 2);
  }
};

// Multiplies up to 32 rows at a time; the registers have the shapes of the last ones.
class TileProduct {
 public:
  ~TileProduct() { release_tiles(); }

  // out [x.num, out_stride] = the products of the rows with those of each of up to four packed
  // tiles, side by side.
  void run(const TileRows& x, int num_tiles, const bf16* const* w, float* out, size_t out_stride) {
    if (x.num <= TILE_ROWS) {
      shape(x.num, 0);
      few_rows(x, num_tiles, w, out, out_stride * sizeof(float));
    } else {
      shape(TILE_ROWS, x.num - TILE_ROWS);
      for (int t = 0; t < num_tiles; t += 2)
        many_rows(x, num_tiles - t, w + t, out + t * LANES, out_stride * sizeof(float));
    }
    fence_tiles();
  }

 private:
  // Registers: 0 … 3 have sums. With few rows 4 has these, 5 … 7 columns; with many 4 and 5 have
  // rows, 6 and 7 columns.
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

  static const bf16* left(const TileRows& x, int row, int i) {
    return i + TILE_DEPTH <= x.k ? x.rows + (size_t)row * x.k + i : x.rest[row];
  }
  static size_t stride(const TileRows& x, int i) {
    return i + TILE_DEPTH <= x.k ? x.stride : sizeof x.rest[0];
  }

  static void few_rows(const TileRows& x, int num_tiles, const bf16* const* w, float* out,
                       size_t out_stride) {
    fence_tiles();
    TILE_ZERO(0);
    if (num_tiles > 1) TILE_ZERO(1);
    if (num_tiles > 2) TILE_ZERO(2);
    if (num_tiles > 3) TILE_ZERO(3);
    for (int i = 0; i < x.k; i += TILE_DEPTH) {
      TILE_LOAD(4, left(x, 0, i), stride(x, i));
      TILE_LOAD(5, w[0] + i * LANES, TILE_BYTES);
      TILE_DOT(0, 4, 5);
      if (num_tiles > 1) {
        TILE_LOAD(6, w[1] + i * LANES, TILE_BYTES);
        TILE_DOT(1, 4, 6);
      }
      if (num_tiles > 2) {
        TILE_LOAD(7, w[2] + i * LANES, TILE_BYTES);
        TILE_DOT(2, 4, 7);
      }
      if (num_tiles > 3) {
        TILE_LOAD(5, w[3] + i * LANES, TILE_BYTES);
        TILE_DOT(3, 4, 5);
      }
    }
    TILE_STORE(0, out, out_stride);
    if (num_tiles > 1) TILE_STORE(1, out + LANES, out_stride);
    if (num_tiles > 2) TILE_STORE(2, out + 2 * LANES, out_stride);
    if (num_tiles > 3) TILE_STORE(3, out + 3 * LANES, out_stride);
  }

  // With the first two of so many tiles.
  static void many_rows(const TileRows& x, int num_tiles, const bf16* const* w, float* out,
                        size_t out_stride) {
    fence_tiles();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int i = 0; i < x.k; i += TILE_DEPTH) {
      TILE_LOAD(4, left(x, 0, i), stride(x, i));
      TILE_LOAD(5, left(x, TILE_ROWS, i), stride(x, i));
      TILE_LOAD(6, w[0] + i * LANES, TILE_BYTES);
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 5, 6);
      if (num_tiles > 1) {
        TILE_LOAD(7, w[1] + i * LANES, TILE_BYTES);
        TILE_DOT(2, 4, 7);
        TILE_DOT(3, 5, 7);
      }
    }
    float* below = out + TILE_ROWS * out_stride / sizeof(float);
    TILE_STORE(0, out, out_stride);
    TILE_STORE(1, below, out_stride);
    if (num_tiles > 1) {
      TILE_STORE(2, out + LANES, out_stride);
      TILE_STORE(3, below + LANES, out_stride);
    }
  }

  int first_ = 0, second_ = 0;
};

// Memory of a thread that stays with it.
template <class T>
inline T* scratch(size_t num) {
  static thread_local T* memory = nullptr;
  static thread_local size_t room = 0;
  if (num > room) {
    free(memory);
    memory = (T*)aligned_alloc(64, (num * sizeof(T) + 63) / 64 * 64);
    room = num;
  }
  return memory;
}

// Codes of sixteen columns, k of each → the same as bf16 in pairs.
INLINE void widen_codes(const int8_t* codes, int k, bf16* out) {
  for (int i = 0; i < k; i += 2)
    for (int lane = 0; lane < LANES; lane++) {
      // What float32 has of a code is in its upper half.
      float even = codes[i * LANES + lane], odd = codes[(i + 1) * LANES + lane];
      uint32_t bits[2];
      memcpy(bits, &even, 4);
      memcpy(bits + 1, &odd, 4);
      uint32_t pair = bits[0] >> 16 | bits[1];
      memcpy(out + (i * LANES + 2 * lane), &pair, 4);
    }
}
