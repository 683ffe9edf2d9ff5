// GEMM of rows with a packed matrix: out[m][n] = Σ a[m][k] · w[n][k].
//
// Each sum runs over k in order, in one accumulator or in AMX's order (tiles.h), independently of
// the other rows and columns: a row's result does not depend on the other rows of its batch.
#pragma once

#include <type_traits>

#include "pool.h"
#include "simd.h"
#include "tiles.h"

// Register block: rows × tiles of accumulators, with the operands of one step.
#if defined(__AVX512BF16__)
constexpr int MAX_ROWS = 6, MAX_TILES = 4;
#elif defined(__AVX512F__)
constexpr int MAX_ROWS = 5, MAX_TILES = 4;
#else
constexpr int MAX_ROWS = 4, MAX_TILES = 1;
#endif

// Rows per pass over the weights; their left operand stays in a core's cache.
template <class T>
constexpr int CHUNK_ROWS = USES_TILES<T> ? 256 : 128;

// Up to FEW_ROWS rows are multiplied part by part of the tiles, PART_DEPTH elements of each column
// at a time; with more rows, memory is seldom idle anyway.
constexpr int FEW_ROWS = 64, PART_DEPTH = 128;

INLINE int div_up(int a, int b) { return (a + b - 1) / b; }

// Packed tiles are zero-padded along k to a multiple of PACKED_DEPTH.
constexpr int PACKED_DEPTH = 32;  // also in kernels/cpu/operators.py
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
  static size_t tile_size(int k) { return (size_t)LANES * div_up(k, PACKED_DEPTH) * PACKED_DEPTH; }
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
constexpr int CODE_BITS<nibble> = 4;

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

// True if this build quantizes rows for weights of W, see rounded.h.
template <class W>
constexpr bool CAN_ROUND = false;

template <int ROWS, int TILES>
INLINE void clear(f32x16 sums[ROWS][TILES]) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) sums[r][t] = zero();
}

// sums[row][tile] += Σ over k elements of row · tile. FETCHES: prefetches the next part of the
// tiles. STEP: distance from DEPTH elements of a row to the next DEPTH elements, in multiples of
// DEPTH.
template <class T, int ROWS, int TILES, bool FETCHES = false, int STEP = 1, class W>
INLINE void multiply(const T* rows, size_t stride, const W* const* tiles, int k,
                     f32x16 sums[ROWS][TILES]) {
  typedef Operands<T> Op;
  for (int i = 0; i < k; i += DEPTH<T>) {
    typename Op::Tile tile[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      tile[t] = Op::tile(tiles[t] + (size_t)i * LANES);
      if (FETCHES) __builtin_prefetch(tiles[t] + (size_t)(i + PART_DEPTH) * LANES);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      typename Op::Shared shared = Op::shared(rows + r * stride + (size_t)i * STEP);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) sums[r][t] = Op::dot(sums[r][t], tile[t], shared);
    }
  }
}

// The same for one group of quantized values, from `start` on. Each pass of rows widens them anew.
template <class T, int ROWS, int TILES, class C>
INLINE void multiply_group(const T* rows, size_t stride, const GroupedTile<C>* tiles, int start,
                           int k, f32x16 sums[ROWS][TILES]) {
  const C* at[TILES];
#pragma GCC unroll 4
  for (int t = 0; t < TILES; t++) at[t] = tiles[t].at(start);
  multiply<T, ROWS, TILES>(rows + start, stride, at, k, sums);
}
template <class T, int ROWS, int TILES>
INLINE void multiply_group(const T* rows, size_t stride, const GroupedTile<nibble>* tiles,
                           int start, int k, f32x16 sums[ROWS][TILES]) {
  typedef Operands<T> Op;
  const CodeTable* table = tiles[0].w->table;
  for (int i = start; i < start + k; i += CODES_DEPTH) {
    Codes codes[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
      const uint8_t* place = tiles[t].codes + i / CODES_DEPTH * CODES_BYTES;
      codes[t] = Codes::load(place);
    }
#pragma GCC unroll 8
    for (int step = 0; step < CODES_DEPTH; step += DEPTH<T>)
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
template <class T, int ROWS, int TILES, class C>
INLINE void multiply(const T* rows, size_t stride, const GroupedTile<C>* tiles, int k,
                     f32x16 sums[ROWS][TILES]) {
  const Packed<Grouped<C>>& w = *tiles[0].w;
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
    multiply_group<T, ROWS, TILES>(rows, stride, tiles, start, k - start < size ? k - start : size,
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

// Adds the sums of a group, `found` [LANES], to `sums` with the arithmetic of `multiply`.
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
    for (int t = 0; t < TILES; t++)
      add_products(sums[t], Operands<bf16>::tile(tiles[t].at(i)), pair);
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
        add_products(sums[t], narrow_tile(codes[t], step, table), pair);
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

// A packed tile's quantized values, k of each column, as pairs of bf16.
template <class C>
void widen_codes(const GroupedTile<C>& tile, int k, bf16* out) {
  widen_codes(tile.at(0), k, out);
}
inline void widen_codes(const GroupedTile<nibble>& tile, int k, bf16* out) {
  for (int i = 0; i < k; i += CODES_DEPTH) {
    Codes codes = Codes::load(tile.codes + i / CODES_DEPTH * CODES_BYTES);
#pragma GCC unroll 4
    for (int step = 0; step < CODES_DEPTH; step += 2)
      store_pairs(out + (i + step) * LANES, codes, step, tile.w->table);
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
// MAX_TILES.
template <int ROWS, class F>
INLINE void with_tiles(int num_tiles, F f) {
  if constexpr (MAX_TILES >= 4) {
    if (num_tiles == 4) return f(Size<ROWS>(), Size<4>());
    if (num_tiles == 3) return f(Size<ROWS>(), Size<3>());
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

// out [num_rows, out_stride] = Σ over k elements of row · tile, added to `out` unless this part is
// the `first` of a sum.
template <class T, class Tile>
void multiply_block(int num_rows, int num_tiles, const T* rows, size_t stride, const Tile* tiles,
                    int k, float* out, size_t out_stride, bool first = true, bool fetches = false) {
  with_sizes(num_rows, num_tiles, [=](auto num_rows, auto num_tiles) {
    constexpr int ROWS = num_rows.value, TILES = num_tiles.value;
    f32x16 sums[ROWS][TILES];
    if (first)
      clear<ROWS, TILES>(sums);
    else
      load_sums<ROWS, TILES>(sums, out, out_stride);
    if constexpr (std::is_pointer<Tile>::value)
      if (fetches) {
        multiply<T, ROWS, TILES, true>(rows, stride, tiles, k, sums);
        return store_sums<ROWS, TILES>(sums, out, out_stride);
      }
    multiply<T, ROWS, TILES>(rows, stride, tiles, k, sums);
    store_sums<ROWS, TILES>(sums, out, out_stride);
  });
}

inline Scratch<uint8_t> product_room;  // workspace of the running GEMMs

// Work items of a GEMM: a range of rows times a range of tiles.
struct Items {
  struct Part {
    int start, end;  // rows
    int tile, num_tiles;
  };
  int num_rows, num_tiles, chunk_rows;
  int group;  // tiles per item

  Items() = default;
  // `unit` tiles stay in one item; items are small enough for all threads to share `total` tiles.
  Items(int num_rows, int num_tiles, int chunk_rows, int unit, int total)
      : num_rows(num_rows), num_tiles(num_tiles), chunk_rows(chunk_rows) {
    int widest = unit > MAX_TILES ? unit : MAX_TILES;
    for (group = widest; group > unit && total / group < 4 * pool_size();) group /= 2;
  }
  int num_groups() const { return div_up(num_tiles, group); }
  int num() const { return num_groups() * div_up(num_rows, chunk_rows); }
  Part part(int item) const {
    int start = item / num_groups() * chunk_rows, tile = item % num_groups() * group;
    int end = start + chunk_rows < num_rows ? start + chunk_rows : num_rows;
    return {start, end, tile, tile + group < num_tiles ? group : num_tiles - tile};
  }
};

// Runs a GEMM. `unit` tiles stay in one item: the receiver gets their sums in one call.
template <class P>
void run_items(P product, int unit) {
  product.take_room(product_room.of(product.room()));
  auto prepare = [&](int part) { product.prepare(part); };
  if (product.num_parts()) share(prepare, product.num_parts());
  product.divide(unit, product.w.num_tiles());
  share(product, product.items.num());
}

// rows [num_rows, w.k] times w, in items for all threads. `out(row, tile, num_tiles, sums)`
// receives the sums of `num_tiles` adjacent tiles from `tile` on.
template <class T, class W, class Out>
struct Product {
  typedef typename Packed<W>::Tile Tile;

  const T* rows;
  int num_rows;
  Packed<W> w;
  Out out;
  Items items = {};
  TileRows packed = {};

  // True if sums have AMX's order. AMX takes 32 elements of k at a time, so groups of 16 cannot use
  // it.
  bool uses_tiles() const {
    if constexpr (HAS_GROUPS<W>) return USES_TILES<T> && w.group % TILE_DEPTH == 0;
    return USES_TILES<T>;
  }

  // Memory for the rows packed for AMX and for row sums, prepared in `num_parts` parts.
  size_t packed_room() const {
    if (!uses_tiles() || num_rows == 1) return 0;
    return (size_t)div_up(num_rows, TILE_ROWS) * TILE_ROWS * TileRows::depth(w.k) * sizeof(bf16);
  }
  size_t room() const {
    size_t room = packed_room();
    if constexpr (HAS_GROUPS<W>)
      if (w.has_zeros) room += (size_t)num_rows * w.num_groups * sizeof(float);
    return room;
  }
  void take_room(uint8_t* memory) {
    packed = {(bf16*)memory, num_rows, w.k};
    if constexpr (HAS_GROUPS<W>) w.row_sums = (float*)(memory + packed_room());
  }
  int num_parts() const {
    if (!room()) return 0;
    return packed_room() ? div_up(num_rows, TILE_ROWS) : num_rows;
  }
  void prepare(int part) const {
    if constexpr (USES_TILES<T>)
      if (packed_room()) packed.pack(rows, part * TILE_ROWS);
    if constexpr (HAS_GROUPS<W>) {
      int each = packed_room() ? TILE_ROWS : 1, end = (part + 1) * each;
      for (int row = part * each; w.has_zeros && row < end && row < num_rows; row++) sum_row(row);
    }
  }

  // `total`: tiles of all GEMMs in the same job.
  void divide(int unit, int total) {
    items = Items(num_rows, w.num_tiles(), CHUNK_ROWS<T>, unit, total);
  }

  void operator()(int item) {
    auto [start, end, tile, num_tiles] = items.part(item);
    if constexpr (USES_TILES<T>)
      if (uses_tiles()) return multiply_tiles(start, end, tile, num_tiles);
    if (end - start > MIN_PASSES * MAX_ROWS && end - start <= FEW_ROWS)
      multiply_few_rows(start, end - start, tile, num_tiles);
    else
      for (int row = start; row < end;) {
        int num = div_up(end - row, div_up(end - row, MAX_ROWS));  // equal passes
        block(row, num, tile, num_tiles);
        row += num;
      }
  }

  // More passes than this take turns at parts of the tiles; fewer passes over dense weights wait
  // for memory anyway.
  static constexpr int MIN_PASSES = std::is_same<T, W>::value ? 2 : 1;

  // Runs all passes over one part of the tiles, then over the next part, which all passes but the
  // first prefetch. Storing sums between parts does not round them.
  void multiply_few_rows(int start, int num_rows, int tile, int num_tiles) {
    alignas(64) float sums[FEW_ROWS][4 * LANES];
    Tile tiles[4];
    for (int from = 0; from < w.k; from += PART_DEPTH) {
      int depth = w.k - from < PART_DEPTH ? w.k - from : PART_DEPTH;
      for (int row = 0; row < num_rows;) {
        int num = div_up(num_rows - row, div_up(num_rows - row, MAX_ROWS));
        for (int t = 0; t < num_tiles; t++) tiles[t] = w.tile(tile + t, from, start + row);
        const T* left = rows + (size_t)(start + row) * w.k + from;
        for (int t = 0; t < num_tiles; t += MAX_TILES) {
          int num_now = num_tiles - t < MAX_TILES ? num_tiles - t : MAX_TILES;
          multiply_block<T>(num, num_now, left, w.k, tiles + t, depth, sums[row] + t * LANES,
                            4 * LANES, from == 0, row > 0);
        }
        row += num;
      }
    }
    for (int r = 0; r < num_rows; r++) out(start + r, tile, num_tiles, sums[r]);
  }

  // Sums a row's elements group by group: the factors of zero points.
  void sum_row(int row) const {
    const T* numbers = rows + (size_t)row * w.k;
    for (int group = 0; group < w.num_groups; group++) {
      int end = (group + 1) * w.group < w.k ? (group + 1) * w.group : w.k;
      f32x16 found = zero();
      for (int i = group * w.group; i < end; i += LANES) found = add(found, load_wide(numbers + i));
      w.row_sums[(size_t)row * w.num_groups + group] = sum(found);
    }
  }

  void multiply_tiles(int start, int end, int tile, int num_tiles) {
    alignas(64) float sums[2 * TILE_ROWS][4 * LANES];
    if (num_rows == 1) return multiply_one_row(tile, num_tiles, sums[0]);
    const bf16* tiles[4];
    for (int t = 0; t < num_tiles; t++) tiles[t] = as_bf16(w.tile(tile + t), t);
    TileProduct product;
    for (int row = start; row < end;) {
      int num = multiply_packed(product, row, tile, num_tiles, tiles, sums[0]);
      for (int r = 0; r < num; r++) out(row + r, tile, num_tiles, sums[r]);
      row += num;
    }
  }

  // sums [num, 4 · LANES] = the products of up to 32 rows; returns the number of rows.
  int multiply_packed(TileProduct& product, int row, int tile, int num_tiles,
                      const bf16* const* tiles, float* sums) {
    constexpr int stride = 4 * LANES;
    if constexpr (!HAS_GROUPS<W>) {
      return product.run(packed, row, num_tiles, tiles, sums, stride, 0, w.k);
    } else {
      alignas(64) float found[2 * TILE_ROWS * stride];
      FlushedToZero flushed;
      memset(sums, 0, sizeof found);
      int num = 0;
      for (int from = 0, group = 0; from < w.k; from += w.group, group++) {
        int depth = w.k - from < w.group ? w.k - from : w.group;
        num = product.run(packed, row, num_tiles, tiles, found, stride, from, depth);
        for (int t = 0; t < num_tiles; t++) {
          Tile own = w.tile(tile + t, 0, row);
          f32x16 scales = w.scales_at(tile + t, from), zeros = zero();
          if (w.has_zeros) zeros = w.zeros_at(tile + t, from);
          for (int r = 0; r < num; r++) {
            float* place = sums + r * stride + t * LANES;
            f32x16 sum = load(place);
            add_group(own, r, group, scales, zeros, load(found + r * stride + t * LANES), sum);
            store(place, sum);
          }
        }
      }
      return num;
    }
  }

  void multiply_one_row(int tile, int num_tiles, float* sums) {
    Tile tiles[4];
    for (int t = 0; t < num_tiles; t++) tiles[t] = w.tile(tile + t);
    {
      FlushedToZero flushed;
      for (int t = 0; t < num_tiles; t += MAX_TILES)
        with_tiles<1>(num_tiles - t < MAX_TILES ? num_tiles - t : MAX_TILES, [=](auto, auto num) {
          multiply_row<num.value>(rows, w.k, tiles + t, sums + t * LANES);
        });
    }
    out(0, tile, num_tiles, sums);
  }

  // A packed tile in bf16; `index` is its number within the item.
  const bf16* as_bf16(const bf16* tile, int) { return tile; }
  template <class C>
  const bf16* as_bf16(const C& tile, int index) {
    size_t size = Packed<bf16>::tile_size(w.k);
    bf16* wide = widened.of(4 * size) + index * size;
    widen_codes(tile, (int)(size / LANES), wide);
    return wide;
  }

  void block(int row, int num, int tile, int num_tiles) {
    alignas(64) float sums[MAX_ROWS][4 * LANES];
    Tile tiles[4];
    for (int t = 0; t < num_tiles; t++) tiles[t] = w.tile(tile + t, 0, row);
    const T* left = rows + (size_t)row * w.k;
    for (int t = 0; t < num_tiles; t += MAX_TILES) {
      int num_now = num_tiles - t < MAX_TILES ? num_tiles - t : MAX_TILES;
      multiply_block<T>(num, num_now, left, w.k, tiles + t, w.k, sums[0] + t * LANES, 4 * LANES);
    }
    for (int r = 0; r < num; r++) out(row + r, tile, num_tiles, sums[r]);
  }
};

// Stores the product, out [num_rows, w.n].
template <class W>
struct Store {
  float* out;
  Packed<W> w;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    for (int t = 0; t < num_tiles; t++) {
      int n = (tile + t) * LANES, num = w.n - n < LANES ? w.n - n : LANES;
      store_some(out + (size_t)row * w.n + n, w.finish(n, num, load(sums + t * LANES)), num);
    }
  }
};

// Adds the product times scale to out [num_rows, w.n].
template <class W>
struct Add {
  float* out;
  Packed<W> w;
  float scale;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    for (int t = 0; t < num_tiles; t++) {
      int n = (tile + t) * LANES, num = w.n - n < LANES ? w.n - n : LANES;
      float* place = out + (size_t)row * w.n + n;
      f32x16 product = w.finish(n, num, load(sums + t * LANES));
      store_some(place, add(load_some(place, num), mul(product, spread(scale))), num);
    }
  }
};

// Numbers added to some rows of a product: `numbers` [num_rows, outputs], or null.
struct Deltas {
  const float* numbers = nullptr;
  const uint8_t* has_some = nullptr;  // [num_rows]
};

// gate · σ(alpha · gate + beta · gate³)
INLINE f32x16 opened(f32x16 gate, float alpha, float beta) {
  f32x16 square = min(mul(gate, gate), spread(1e30f));  // finite, as 0 · ∞ is NaN
  f32x16 slope = fma(square, spread(-beta), spread(-alpha));
  return div(gate, add(spread(1.0f), exp(mul(gate, slope))));
}

// opened(gate) · up → out [num_rows, w.n / 2]; each tile of gates precedes
// its tile of ups, in `deltas` all gates precede all ups. With a limit, gates are clamped to at
// most `limit`, ups to ± limit, and ups are increased by 1. With alpha 0 there are no gates:
// max(up, 0)² → out [num_rows, w.n].
template <class T, class W>
struct Gate {
  T* out;
  Packed<W> w;
  float alpha = 1, beta = 0, limit = 0;
  Deltas deltas = {};

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    if (!alpha) return square(row, tile, num_tiles, sums);
    for (int t = 0; t < num_tiles; t += 2) {
      int n = (tile + t) * LANES;
      f32x16 gate = w.finish(n, LANES, load(sums + t * LANES));
      f32x16 up = w.finish(n + LANES, LANES, load(sums + (t + 1) * LANES));
      if (deltas.numbers && deltas.has_some[row]) {
        const float* own = deltas.numbers + (size_t)row * w.n + n / 2;
        gate = add(gate, load(own));
        up = add(up, load(own + w.n / 2));
      }
      if (limit) {
        f32x16 most = spread(limit);
        gate = min(most, gate);  // with NaN, min returns its second operand
        up = add(max(sub(zero(), most), min(most, up)), spread(1.0f));
      }
      store_narrow(out + (size_t)row * (w.n / 2) + n / 2, mul(opened(gate, alpha, beta), up));
    }
  }

  void square(int row, int tile, int num_tiles, const float* sums) const {
    for (int t = 0; t < num_tiles; t++) {
      int n = (tile + t) * LANES;
      size_t place = (size_t)row * w.n + n;
      f32x16 up = w.finish(n, LANES, load(sums + t * LANES));
      if (deltas.numbers && deltas.has_some[row]) up = add(up, load(deltas.numbers + place));
      up = max(zero(), up);  // with NaN, max returns its second operand
      store_narrow(out + place, mul(up, up));
    }
  }
};
