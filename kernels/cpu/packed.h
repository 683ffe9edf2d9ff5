// Packed matrices: tiles of sixteen output columns.
#pragma once

#include "simd.h"
#include "tiles.h"

INLINE int div_up(int a, int b) { return (a + b - 1) / b; }

// Packed tiles are zero-padded along k to a multiple of PACKED_DEPTH, dense ones of up to
// SHALLOW_DEPTH to this: padding would double the B of most adapters.
constexpr int PACKED_DEPTH = 32, SHALLOW_DEPTH = 16;  // also in kernels/cpu/operators.py
static_assert(PACKED_DEPTH % TILE_DEPTH == 0);

// w [n, k] as contiguous tiles of sixteen output columns, step by step of k. The last tile is
// zero-padded. W is the type of the rows, or int8_t: quantized values with a scale per column,
// applied to the sums.
template <class W>
struct Packed {
  typedef W Numbers;
  typedef const W* Tile;

  const W* tiles;
  const float* bias;    // [n] or null
  const float* scales;  // [n] or null
  int n, k;
  bool rounds;  // quantizes rows, see rounded.h

  int num_tiles() const { return div_up(n, LANES); }
  static size_t tile_size(int k) {
    if (sizeof(W) > 1 && k <= SHALLOW_DEPTH) return (size_t)LANES * SHALLOW_DEPTH;
    return (size_t)LANES * div_up(k, PACKED_DEPTH) * PACKED_DEPTH;
  }
  // The tile from k = `from` on; equal for all rows.
  Tile tile(int index, int from = 0, int /* row */ = 0) const {
    return tiles + index * tile_size(k) + (size_t)from * LANES;
  }

  // Applies scale and bias to sixteen columns from `column` on; `num` of them exist.
  f32x16 finish(int column, int num, f32x16 sums) const {
    if (scales) sums = mul(sums, load_some(scales + column, num));
    return bias ? add(sums, load_some(bias + column, num)) : sums;
  }
};

// Quantized values of type C with a scale, and perhaps a zero point, for each group of a column:
// out = Σ over groups of scale · (Σ a · q − zero · Σ a).
template <class C>
struct Grouped {};
struct nibble {};  // a quantized value of four bits
template <class C>
constexpr int CODE_BITS = 8;
template <>
inline constexpr int CODE_BITS<nibble> = 4;

// A packed tile and its groups from some k on, for rows from some row on.
template <class C>
struct GroupedTile {
  const Packed<Grouped<C>>* w;
  const uint8_t* codes;
  const uint8_t* scales;  // of the first group
  const float* sums;      // of the first row in each group, see Packed::row_sums

  const C* at(int k) const { return (const C*)codes + (size_t)k * LANES; }
};

// Tiles are zero-padded like dense ones; scales and zero points are separate. k is a multiple of
// 16, `group` a power of two from 16 to PART_DEPTH.
template <class C>
struct Packed<Grouped<C>> {
  typedef Grouped<C> Numbers;
  typedef GroupedTile<C> Tile;

  const uint8_t* tiles;
  const float* bias;       // [n] or null
  const void* scales;      // [tiles][groups][LANES], then zero points of the same shape, if any
  const CodeTable* table;  // of quantized values of four bits
  int n, k, group, num_groups;
  bool rounds;              // quantizes rows, see rounded.h
  bool has_zeros, is_wide;  // is_wide: scales and zero points are float, not bf16
  float* row_sums;          // [rows][groups]: Σ of a row's elements, if there are zero points

  int num_tiles() const { return div_up(n, LANES); }
  static size_t tile_bytes(int k) { return Packed<fp8>::tile_size(k) * CODE_BITS<C> / 8; }
  size_t scale_bytes() const { return LANES * (is_wide ? sizeof(float) : sizeof(bf16)); }
  // For a tile's columns in the group of k.
  f32x16 scales_at(int index, int k) const {
    return number((const uint8_t*)scales + group_at(index, k) * scale_bytes());
  }
  f32x16 zeros_at(int index, int k) const {
    size_t at = (size_t)num_tiles() * num_groups + group_at(index, k);
    return number((const uint8_t*)scales + at * scale_bytes());
  }
  size_t group_at(int index, int k) const {
    return (size_t)index * num_groups + (k >> __builtin_ctz(group));
  }
  f32x16 number(const uint8_t* at) const {
    return is_wide ? load((const float*)at) : load_wide((const bf16*)at);
  }
  Tile tile(int index, int from = 0, int row = 0) const {
    const uint8_t* codes = tiles + index * tile_bytes(k) + (size_t)from * LANES * CODE_BITS<C> / 8;
    int first = from >> __builtin_ctz(group);
    const float* sums = has_zeros ? row_sums + (size_t)row * num_groups + first : nullptr;
    return {this, codes, (const uint8_t*)scales + group_at(index, from) * scale_bytes(), sums};
  }
  f32x16 finish(int column, int num, f32x16 sums) const {
    return bias ? add(sums, load_some(bias + column, num)) : sums;
  }
};

template <class W>
constexpr bool HAS_GROUPS = false;
template <class C>
constexpr bool HAS_GROUPS<Grouped<C>> = true;

// The type of a quantized matrix's values.
template <class W>
struct CodeType {
  typedef W Type;
};
template <class C>
struct CodeType<Grouped<C>> {
  typedef C Type;
};
template <class W>
using CodeOf = typename CodeType<W>::Type;
