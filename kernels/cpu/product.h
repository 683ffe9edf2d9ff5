// GEMM of rows with a packed matrix: out[m][n] = Σ a[m][k] · w[n][k].
//
// Each sum runs over k in order, in one accumulator or in AMX's order (tiles.h), independently of
// the other rows and columns: a row's result does not depend on the other rows of its batch.
#pragma once

#include "groups.h"
#include "pool.h"
#include "unpack.h"

// Rows per pass over the weights; their left operand stays in a core's cache.
template <class T>
constexpr int CHUNK_ROWS = USES_TILES<T> ? 256 : 128;

// Up to FEW_ROWS rows are multiplied part by part of the tiles; with more rows, memory is seldom
// idle anyway.
constexpr int FEW_ROWS = 64;
constexpr int KEPT_BYTES = 1 << 14;  // of unpacked values: half of a core's first cache
// With so few rows and tiles, memory waits between parts of tiles unless the next one is
// prefetched.
constexpr int NARROW_ROWS = 2, NARROW_TILES = 4;

// True if this build quantizes rows for weights of W, see rounded.h.
template <class W>
constexpr bool CAN_ROUND = false;

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
    if constexpr (!IS_POINTER<Tile>)
      multiply_groups<ROWS, TILES>(rows, stride, tiles, k, sums);
    else if (fetches)
      multiply<T, ROWS, TILES, true>(rows, stride, tiles, k, sums);
    else
      multiply<T, ROWS, TILES>(rows, stride, tiles, k, sums);
    store_sums<ROWS, TILES>(sums, out, out_stride);
  });
}

// The same for scaled values of `num_tiles` tiles of w from `tile` on.
template <class T, bool HAS_ZEROS, class W>
void decode_block(int num_rows, const float* rows, const Packed<W>& w, int tile, int num_tiles,
                  float* out, size_t out_stride) {
  with_sizes(num_rows, num_tiles, [&](auto num_rows, auto num_tiles) {
    constexpr int ROWS = num_rows.value, TILES = num_tiles.value;
    if constexpr (TILES <= decoded_tiles(ROWS)) {
      f32x16 sums[ROWS][TILES];
      clear<ROWS, TILES>(sums);
      const size_t stride = w.k;
      auto add = [&](int t, int k, f32x16 scaled) __attribute__((always_inline)) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
          sums[r][t] = fma(scaled, spread(rows[r * stride + k]), sums[r][t]);
      };
      each_scaled<T, TILES, HAS_ZEROS>(w, tile, 0, w.k, add);
      store_sums<ROWS, TILES>(sums, out, out_stride);
    }
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
    for (group = MOST_TILES; group > unit && total / group < 4 * pool_size();) group /= 2;
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
  typedef Factor<T> Number;
  static constexpr bool IS_DENSE = IS_SAME<T, W>;
  static constexpr bool IS_WIDE = IS_SAME<Number, float>;
  static constexpr bool WIDENS = IS_WIDE && !IS_SAME<T, float>;
  static constexpr bool DECODES = IS_WIDE && !IS_DENSE;  // to scaled values in float32
  static constexpr bool SUMS_GROUPS = HAS_GROUPS<W> && !IS_WIDE;

  const T* rows;
  int num_rows;
  Packed<W> w;
  Out out;
  Items items = {};
  TileRows packed = {};
  Number* wide = nullptr;  // [num_rows, w.k], if this build WIDENS rows

  // True if sums have AMX's order. AMX takes 32 elements of k at a time, so groups of 16 and
  // shallow tiles cannot use it.
  bool uses_tiles() const {
    if (w.k <= SHALLOW_DEPTH) return false;
    if constexpr (HAS_GROUPS<W>) return USES_TILES<T> && w.group % TILE_DEPTH == 0;
    return USES_TILES<T>;
  }

  // Memory for rows packed for AMX, row sums, and wide rows, prepared in `num_parts` parts.
  size_t packed_room() const {
    if (!uses_tiles() || num_rows == 1) return 0;
    return (size_t)div_up(num_rows, TILE_ROWS) * TILE_ROWS * TileRows::depth(w.k) * sizeof(bf16);
  }
  size_t room() const {
    size_t room = packed_room();
    if constexpr (SUMS_GROUPS)
      if (w.has_zeros) room += (size_t)num_rows * w.num_groups * sizeof(float);
    if (WIDENS) room += (size_t)num_rows * w.k * sizeof(Number);
    return room;
  }
  void take_room(uint8_t* memory) {
    packed = {(bf16*)memory, num_rows, w.k};
    wide = (Number*)memory;
    if constexpr (SUMS_GROUPS) w.row_sums = (float*)(memory + packed_room());
  }
  int num_parts() const {
    if (!room()) return 0;
    return packed_room() ? div_up(num_rows, TILE_ROWS) : num_rows;
  }
  void prepare(int part) const {
    if constexpr (USES_TILES<T>)
      if (packed_room()) packed.pack(rows, part * TILE_ROWS);
    if constexpr (WIDENS)
      for (size_t i = (size_t)part * w.k, end = i + w.k; i < end; i++) wide[i] = widen(rows[i]);
    if constexpr (SUMS_GROUPS) {
      int each = packed_room() ? TILE_ROWS : 1, end = (part + 1) * each;
      for (int row = part * each; w.has_zeros && row < end && row < num_rows; row++) sum_row(row);
    }
  }

  // `total`: tiles of all GEMMs in the same job.
  void divide(int unit, int total) {
    items = Items(num_rows, w.num_tiles(), CHUNK_ROWS<T>, unit, total);
  }

  // Prefetches the tiles of an item. Inlined: GCC takes it for a function without effects.
  __attribute__((always_inline)) void fetch(int item) const {
    Items::Part part = items.part(item);
    const char* at = (const char*)w.tile(part.tile);
    for (const char* end = (const char*)w.tile(part.tile + part.num_tiles); at < end; at += 64)
      __builtin_prefetch(at);
  }

  void operator()(int item) {
    auto [start, end, tile, num_tiles] = items.part(item);
    if constexpr (USES_TILES<T>)
      if (uses_tiles()) return multiply_tiles(start, end, tile, num_tiles);
    multiply_rows(start, end - start, tile, num_tiles);
  }

  // A range of rows times a range of tiles, over a part of k.
  struct Part {
    int start, num_rows, tile, num_tiles, from, depth;
  };

  // All passes of rows run over one part of the tiles, then over the next part; quantized values
  // are decoded once for all passes. Storing sums between parts does not round them.
  void multiply_rows(int start, int num_rows, int tile, int num_tiles) {
    alignas(64) float sums[CHUNK_ROWS<T>][MOST_TILES * LANES];
    int at_once = tiles_at_once(num_rows), depth = part_depth(num_rows, at_once);
    for (int from = 0; from < w.k; from += depth)
      for (int t = 0; t < num_tiles; t += at_once) {
        int now = num_tiles - t < at_once ? num_tiles - t : at_once;
        Part part = {start, num_rows, tile + t, now, from, w.k - from < depth ? w.k - from : depth};
        multiply_part(part, sums[0] + t * LANES);
      }
    for (int r = 0; r < num_rows; r++) out(start + r, tile, num_tiles, sums[r]);
  }

  static int next_pass(int num_left) { return div_up(num_left, div_up(num_left, MAX_ROWS)); }

  // True if values are unpacked once for several passes.
  static bool keeps(int num_rows) {
    return IS_DENSE ? WIDENS && num_rows > FEW_ROWS : num_rows > MAX_ROWS;
  }

  static int tiles_at_once(int num_rows) {
    if (DECODES && !keeps(num_rows)) return decoded_tiles(num_rows);
    return most_tiles(next_pass(num_rows));
  }

  bool is_narrow(int num_rows) const {
    return IS_DENSE && num_rows <= NARROW_ROWS && w.num_tiles() <= NARROW_TILES;
  }

  // Fewer than three passes over dense weights wait for memory anyway.
  int part_depth(int num_rows, int at_once) const {
    if (keeps(num_rows)) return KEPT_BYTES / (at_once * LANES * (int)sizeof(Number));
    if (is_narrow(num_rows)) return PART_DEPTH;
    if (!IS_DENSE || num_rows <= 2 * MAX_ROWS || num_rows > FEW_ROWS) return w.k;
    return PART_DEPTH;
  }

  void multiply_part(const Part& part, float* sums) {
    if (keeps(part.num_rows)) return unpack_part(part, sums);
    if constexpr (DECODES) {
      decode_part(part, sums);
    } else {
      bool fetches = part.num_rows <= FEW_ROWS && (part.num_tiles == 1 || part.depth < w.k);
      run_passes(part, sums, fetches,
                 [&](int t, int row) { return w.tile(part.tile + t, part.from, row); });
    }
  }

  void decode_part(const Part& part, float* sums) {
    with_zeros([&](auto has_zeros) {
      decode_block<T, has_zeros.value>(part.num_rows, left_of(part.start), w, part.tile,
                                       part.num_tiles, sums, MOST_TILES * LANES);
    });
  }

  void unpack_part(const Part& part, float* sums) {
    alignas(64) Number values[KEPT_BYTES / sizeof(Number)];
    auto own = [&](int t) { return values + t * part.depth * LANES; };
    for (int t = 0; t < part.num_tiles; t++) {
      if constexpr (DECODES)
        with_zeros([&](auto has_zeros) {
          auto keep = [&](int, int k, f32x16 scaled) __attribute__((always_inline)) {
            store(own(t) + (k - part.from) * LANES, scaled);
          };
          each_scaled<T, 1, has_zeros.value>(w, part.tile + t, part.from, part.depth, keep);
        });
      else if constexpr (!IS_DENSE || WIDENS)
        unpack(w, part.tile + t, part.from, part.depth, own(t));
    }
    run_passes(part, sums, false, [&](int t, int row) {
      if constexpr (SUMS_GROUPS)
        return UnpackedTile<CodeOf<W>>{w.tile(part.tile + t, part.from, row), own(t)};
      else
        return (const Number*)own(t);
    });
  }

  // Calls f(Flag<has_zeros>).
  template <class F>
  void with_zeros(F f) const {
    if constexpr (HAS_GROUPS<W>)
      if (w.has_zeros) return f(Flag<true>());
    f(Flag<false>());
  }

  const Number* left_of(int row) const {
    if constexpr (WIDENS)
      return wide + (size_t)row * w.k;
    else
      return rows + (size_t)row * w.k;
  }

  // Passes of rows. tile_of(t, row): a tile of the part, for rows from `row` on.
  // All passes but the first prefetch the next part if it `fetches`, and the only one of a narrow
  // product.
  template <class F>
  void run_passes(const Part& part, float* sums, bool fetches, F tile_of) {
    for (int r = 0; r < part.num_rows;) {
      int num = next_pass(part.num_rows - r), row = part.start + r;
      decltype(tile_of(0, 0)) tiles[MOST_TILES];
      for (int t = 0; t < part.num_tiles; t++) tiles[t] = tile_of(t, row);
      multiply_block<Number>(num, part.num_tiles, left_of(row) + part.from, w.k, tiles, part.depth,
                             sums + r * MOST_TILES * LANES, MOST_TILES * LANES, part.from == 0,
                             fetches && (r > 0 || is_narrow(part.num_rows)));
      r += num;
    }
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
    alignas(64) float sums[2 * TILE_ROWS][MOST_TILES * LANES];
    if (num_rows == 1) return multiply_one_row(tile, num_tiles, sums[0]);
    const bf16* tiles[4];
    for (int t = 0; t < num_tiles; t++) tiles[t] = as_bf16(tile + t, t);
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
      with_tiles<1>(num_tiles,
                    [=](auto, auto num) { multiply_row<num.value>(rows, w.k, tiles, sums); });
    }
    out(0, tile, num_tiles, sums);
  }

  // A packed tile in bf16; `index` is its number within the item.
  const bf16* as_bf16(int tile, int index) {
    if constexpr (IS_DENSE) {
      return w.tile(tile);
    } else {
      size_t size = Packed<bf16>::tile_size(w.k);
      bf16* values = widened.of(4 * size) + index * size;
      unpack(w, tile, 0, (int)(size / LANES), values);
      return values;
    }
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

  Deltas from(int row, size_t size) const {
    return numbers ? Deltas{numbers + row * size, has_some + row} : Deltas{};
  }
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

// gelu(product) → out [num_rows, w.n]; or gelu(gate) · up → out [num_rows, w.n / 2], in Gate's
// order.
template <class T, class W>
struct Gelu {
  T* out;
  Packed<W> w;
  bool has_gates;

  void operator()(int row, int tile, int num_tiles, const float* sums) const {
    for (int t = 0; t < num_tiles; t += 1 + has_gates) {
      int n = (tile + t) * LANES;
      f32x16 found = gelu(w.finish(n, LANES, load(sums + t * LANES)));
      if (has_gates) found = mul(found, w.finish(n + LANES, LANES, load(sums + (t + 1) * LANES)));
      size_t place = (size_t)row * w.n + n;
      store_narrow(out + (has_gates ? place / 2 : place), found);
    }
  }
};
