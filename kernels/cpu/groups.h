// Sums of products of bf16 rows with groups of quantized values: out = Σ over groups of
// scale · (Σ a · q − zero · Σ a).
#pragma once

#include "multiply.h"

// A tile with unpacked values.
template <class C>
struct UnpackedTile : GroupedTile<C> {
  const bf16* values;

  const bf16* at(int k) const { return values + (size_t)k * LANES; }
};

// sums[row][tile] += Σ over k elements of one group, from `start` on, of row · tile.
template <int ROWS, int TILES, class Tile>
INLINE void multiply_group(const bf16* rows, size_t stride, const Tile* tiles, int start, int k,
                           f32x16 sums[ROWS][TILES]) {
  decltype(tiles->at(0)) at[TILES];
#pragma GCC unroll 4
  for (int t = 0; t < TILES; t++) at[t] = tiles[t].at(start);
  multiply<bf16, ROWS, TILES>(rows + start, stride, at, k, sums);
}
template <int ROWS, int TILES>
INLINE void multiply_group(const bf16* rows, size_t stride, const GroupedTile<nibble>* tiles,
                           int start, int k, f32x16 sums[ROWS][TILES]) {
  typedef PairOperands Op;
  const CodeTable* table = tiles[0].w->table;
  for (int i = start; i < start + k; i += CODES_DEPTH) {
    Codes codes[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      const uint8_t* place = tiles[t].codes + i / CODES_DEPTH * CODES_BYTES;
      codes[t] = Codes::load(place);
    }
#pragma GCC unroll 8
    for (int step = 0; step < CODES_DEPTH; step += 2)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) {
        typename Op::Tile tile = Op::tile(codes[t], step, table);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
          sums[r][t] = Op::dot(sums[r][t], tile, Op::shared(rows + r * stride + i + step));
      }
  }
}

// The same for all groups.
template <int ROWS, int TILES, class Tile>
INLINE void multiply_groups(const bf16* rows, size_t stride, const Tile* tiles, int k,
                            f32x16 sums[ROWS][TILES]) {
  const auto& w = *tiles[0].w;
  const int size = w.group, num_groups = w.num_groups;
  const bool is_wide = w.is_wide, has_zeros = w.has_zeros;
  const size_t scale_bytes = w.scale_bytes(), to_zeros = w.num_tiles() * num_groups * scale_bytes;
  auto number = [=](const uint8_t* at) {
    return is_wide ? load((const float*)at) : load_wide((const bf16*)at);
  };
  size_t at = 0;
  for (int start = 0, group = 0; start < k; start += size, group++, at += scale_bytes) {
    f32x16 found[ROWS][TILES];
    clear<ROWS, TILES>(found);
    multiply_group<ROWS, TILES>(rows, stride, tiles, start, k - start < size ? k - start : size,
                                found);
    if (has_zeros) {
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) {
        f32x16 zeros = sub(zero(), number(tiles[t].scales + to_zeros + at));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          float sum = tiles[t].sums[(size_t)r * num_groups + group];
          found[r][t] = fma(zeros, spread(sum), found[r][t]);
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      f32x16 scales = number(tiles[t].scales + at);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) sums[r][t] = fma(found[r][t], scales, sums[r][t]);
    }
  }
}

// Adds the sums of a group, `found` [LANES], to `sums` with the arithmetic of `multiply_groups`.
template <class C>
INLINE void add_group(const GroupedTile<C>& tile, int row, int group, f32x16 scales, f32x16 zeros,
                      f32x16 found, f32x16& sums) {
  const Packed<Grouped<C>>& w = *tile.w;
  if (w.has_zeros)
    found = fma(sub(zero(), zeros), spread(tile.sums[(size_t)row * w.num_groups + group]), found);
  sums = fma(found, scales, sums);
}

// A row in AMX's order of sums (tiles.h), from i to `end`: at most 32 elements.
template <int TILES, class C>
INLINE void add_pairs(const bf16* row, const GroupedTile<C>* tiles, int i, int end,
                      PairSums sums[TILES]) {
  for (; i < end; i += 2) {
    Pair pair(row + i);
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) add_products(sums[t], PairOperands::tile(tiles[t].at(i)), pair);
  }
}
template <int TILES>
INLINE void add_pairs(const bf16* row, const GroupedTile<nibble>* tiles, int i, int end,
                      PairSums sums[TILES]) {
  const CodeTable* table = tiles[0].w->table;
  for (; i < end; i += CODES_DEPTH) {
    Codes codes[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++)
      codes[t] = Codes::load(tiles[t].codes + i / CODES_DEPTH * CODES_BYTES);
#pragma GCC unroll 4
    for (int step = 0; step < CODES_DEPTH; step += 2) {
      Pair pair(row + i + step);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++)
        add_products(sums[t], PairOperands::tile(codes[t], step, table), pair);
    }
  }
}

template <int TILES, class C>
void multiply_row(const bf16* row, int k, const GroupedTile<C>* tiles, float* out) {
  const Packed<Grouped<C>>& w = *tiles[0].w;
  const size_t scale_bytes = w.scale_bytes();
  const size_t to_zeros = (size_t)w.num_tiles() * w.num_groups * scale_bytes;
  f32x16 sums[TILES];
  for (int t = 0; t < TILES; t++) sums[t] = zero();
  for (int start = 0, group = 0; start < k; start += w.group, group++) {
    int end = start + w.group < k ? start + w.group : k;
    f32x16 found[TILES];
    for (int t = 0; t < TILES; t++) found[t] = zero();
    for (int i = start; i < end; i += TILE_DEPTH) {
      PairSums pairs[TILES];
      for (int t = 0; t < TILES; t++) pairs[t] = {zero(), zero()};
      add_pairs<TILES>(row, tiles, i, i + TILE_DEPTH < end ? i + TILE_DEPTH : end, pairs);
      for (int t = 0; t < TILES; t++) found[t] = add(found[t], add(pairs[t].even, pairs[t].odd));
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      const uint8_t* scales = tiles[t].scales + group * scale_bytes;
      f32x16 zeros = w.has_zeros ? w.number(scales + to_zeros) : zero();
      add_group(tiles[t], 0, group, w.number(scales), zeros, found[t], sums[t]);
    }
  }
  for (int t = 0; t < TILES; t++) store(out + t * LANES, sums[t]);
}
