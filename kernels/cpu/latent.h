// Multi-head latent attention (MLA, arXiv 2405.04434) with absorbed projections: an entry of the
// cache is the key of all heads, and its first `rank` elements are their value. LatentQueries
// projects queries into the latent space, LatentValues projects the attended latents to each head's
// values.
//
// Splits are joined as in attention.h: a token's result depends on its own keys only.
#pragma once

#include "attention.h"
#include "heads.h"

// Also in kernels/cpu/operators.py.
constexpr int MAX_RANK = 512, MAX_ROPE_DIM = 64, MAX_NOPE_DIM = 256;
constexpr int LATENT_GROUP = 128;  // quantized elements with a scale; also in kv_codes/latents.py
constexpr int LATENT_ROWS = 64;    // queries of a unit: tokens × heads; a multiple of 16
constexpr int TOKENS_AT_ONCE = 32;
// Blocks for a core's L1 cache: elements of each query per pass, and tiles of a split's latents.
constexpr int SCORE_DEPTH = 192, LATENT_TILES = 4;

typedef SumsOf<MAX_RANK> LatentSums;

struct LatentShape {
  int num_heads, rank, nope_dim, rope_dim, value_dim;
  bool is_interleaved;

  int entry_dim() const { return rank + rope_dim; }
};

struct Rotation {
  const int64_t* positions;  // [num_tokens]
  const float *cos, *sin;    // [positions, rope_dim]
  int dim;
  bool is_interleaved;

  // Rotates x [dim] of token t → to.
  template <class T>
  void operator()(int t, const float* x, T* to) const {
    alignas(64) float turned[MAX_ROPE_DIM];
    memcpy(turned, x, dim * sizeof(float));
    rotate(turned, cos + positions[t] * dim, sin + positions[t] * dim, dim, is_interleaved);
    for (int i = 0; i < dim; i += LANES) store_narrow(to + i, load(turned + i));
  }
};

// The cache of one layer. An entry is the latent [rank] and its key [rope_dim] in the model's type;
// or the quantized latent, with a scale for each LATENT_GROUP elements, and then the key, still in
// the model's type.
template <class T>
struct LatentCache {
  uint8_t* entries;
  float* scales;  // [slots, num_groups()]
  Cached cached;
  int rank, rope_dim;

  bool has_codes() const { return cached != NUMBERS; }
  int num_groups() const { return div_up(rank, LATENT_GROUP); }
  size_t latent_bytes() const { return rank * (has_codes() ? 1 : sizeof(T)); }
  uint8_t* entry(size_t slot) const {
    return entries + slot * (latent_bytes() + rope_dim * sizeof(T));
  }
  T* key(size_t slot) const { return (T*)(entry(slot) + latent_bytes()); }

  // Writes the normed latent of an entry.
  void write(size_t slot, const float* latent, const float* weight, float eps) const {
    if (!has_codes()) return norm(latent, weight, rank, eps, (T*)entry(slot));
    alignas(64) float normed[MAX_RANK];
    norm(latent, weight, rank, eps, normed);
    if (cached == INT8_CODES)
      encode_groups<int8_t>(slot, normed);
    else
      encode_groups<fp8>(slot, normed);
  }

  // Reads an entry [rank + rope_dim].
  void read(size_t slot, T* to) const {
    if (cached == NUMBERS)
      memcpy(to, entry(slot), rank * sizeof(T));
    else if (cached == INT8_CODES)
      decode_groups<int8_t>(slot, to);
    else
      decode_groups<fp8>(slot, to);
    memcpy(to + rank, key(slot), rope_dim * sizeof(T));
  }

 private:
  template <class W>
  void encode_groups(size_t slot, const float* normed) const {
    W* codes = (W*)entry(slot);
    float* own = scales + slot * num_groups();
    for (int i = 0; i < rank; i += LATENT_GROUP) {
      int left = rank - i, size = left < LATENT_GROUP ? left : LATENT_GROUP;
      own[i / LATENT_GROUP] = encode(normed + i, size, codes + i);
    }
  }

  template <class W>
  void decode_groups(size_t slot, T* to) const {
    const W* codes = (const W*)entry(slot);
    const float* own = scales + slot * num_groups();
    for (int i = 0; i < rank; i += LANES)
      store_narrow(to + i, mul(load_wide(codes + i), spread(own[i / LATENT_GROUP])));
  }
};

// latent [num_tokens, rank + rope_dim] → the cache: first part normed, second part rotated.
template <class T>
void write_latents(const LatentShape& shape, const Rotation& rotation, const float* latent,
                   const float* weight, float eps, int num_tokens, const int64_t* slot_mapping,
                   const LatentCache<T>& cache) {
  int size = shape.entry_dim();
  each_row(num_tokens, size, [=, &shape, &rotation, &cache](size_t at) {
    int t = (int)(at / size);
    cache.write(slot_mapping[t], latent + at, weight, eps);
    rotation(t, latent + at + shape.rank, cache.key(slot_mapping[t]));
  });
}

// rows [num_rows, w.k] · `num_tiles` tiles of w from `first` on → out, in the rows' type.
template <class T>
void narrow_product(const T* rows, size_t stride, int num_rows, const Packed<T>& w, int first,
                    int num_tiles, T* out, size_t out_stride) {
  for (int tile = 0; tile < num_tiles; tile += MAX_TILES) {
    int now = num_tiles - tile < MAX_TILES ? num_tiles - tile : MAX_TILES;
    const T* tiles[MAX_TILES];
    for (int t = 0; t < now; t++) tiles[t] = w.tile(first + tile + t);
    for (int r = 0; r < num_rows;) {
      int num = div_up(num_rows - r, div_up(num_rows - r, MAX_ROWS));
      alignas(64) float sums[MAX_ROWS * MAX_TILES * LANES];
      multiply_block<T>(num, now, rows + r * stride, stride, tiles, w.k, sums, now * LANES);
      for (int i = 0; i < num; i++)
        for (int t = 0; t < now; t++)
          store_narrow(out + (r + i) * out_stride + (tile + t) * LANES,
                       load(sums + (i * now + t) * LANES));
      r += num;
    }
  }
}

// Projects queries into the latent space and rotates their second part.
template <class T>
struct LatentQueries {
  LatentShape shape;
  Rotation rotation;
  const float* query;  // [num_tokens, num_heads, nope_dim + rope_dim]
  int num_tokens;
  Packed<T> keys;  // [num_heads · rank, nope_dim]
  T* out;          // [num_tokens, num_heads, rank + rope_dim]

  void run() { share(*this, shape.num_heads * div_up(num_tokens, TOKENS_AT_ONCE)); }

  void operator()(int item) {
    int head = item % shape.num_heads, first = item / shape.num_heads * TOKENS_AT_ONCE;
    int left = num_tokens - first, num = left < TOKENS_AT_ONCE ? left : TOKENS_AT_ONCE;
    int nope_dim = shape.nope_dim, size = nope_dim + shape.rope_dim, entry = shape.entry_dim();
    alignas(64) T rows[TOKENS_AT_ONCE * MAX_NOPE_DIM];
    T* to = out + ((size_t)first * shape.num_heads + head) * entry;
    size_t stride = (size_t)shape.num_heads * entry;
    for (int t = 0; t < num; t++) {
      const float* from = query + ((size_t)(first + t) * shape.num_heads + head) * size;
      for (int i = 0; i < nope_dim; i += LANES)
        store_narrow(rows + t * nope_dim + i, load(from + i));
      rotation(first + t, from + nope_dim, to + t * stride + shape.rank);
    }
    int num_tiles = shape.rank / LANES;
    narrow_product(rows, nope_dim, num, keys, head * num_tiles, num_tiles, to, stride);
  }
};

// Projects attended latents to the values of each head.
template <class T>
struct LatentValues {
  LatentShape shape;
  const T* attended;  // [num_tokens, num_heads, rank]
  int num_tokens;
  Packed<T> values;  // [num_heads · value_dim, rank]
  T* out;            // [num_tokens, num_heads, value_dim]

  void run() { share(*this, shape.num_heads * div_up(num_tokens, TOKENS_AT_ONCE)); }

  void operator()(int item) {
    int head = item % shape.num_heads, first = item / shape.num_heads * TOKENS_AT_ONCE;
    int left = num_tokens - first, num = left < TOKENS_AT_ONCE ? left : TOKENS_AT_ONCE;
    size_t at = (size_t)first * shape.num_heads + head, heads = shape.num_heads;
    int num_tiles = shape.value_dim / LANES;
    narrow_product(attended + at * shape.rank, heads * shape.rank, num, values, head * num_tiles,
                   num_tiles, out + at * shape.value_dim, heads * shape.value_dim);
  }
};

// Sixteen elements of each of DEPTH rows → one step of a tile.
INLINE void interleave(const float* rows, size_t /* stride */, float* to) { store(to, load(rows)); }
INLINE void interleave(const bf16* rows, size_t stride, bf16* to) {
  u32x16 even = bits_of(load_wide(rows)), odd = bits_of(load_wide(rows + stride));
  store((uint32_t*)to, either(shift_right(even, 16), odd));
}

// A thread takes the queries of some tokens and heads at a time. The queries are the packed matrix
// and the entries of the cache are the rows, so that scores of different queries are in different
// lanes.
template <class T>
struct LatentAttention {
  Rows rows;
  const LatentCache<T>& cache;
  int block_size;
  const Units& units;
  const T* query;        // [tokens, num_heads, entry_dim]
  T* out;                // [tokens, num_heads, rank]
  LatentSums* partials;  // [units.num_partials(), num_heads]
  int num_heads, heads_at_once, rank, entry_dim;
  float scale;
  const int32_t* chosen;  // [tokens, topk] of index.h, or null; then a unit has one token
  int topk;

  static constexpr float INFINITE = __builtin_inff();

  struct Item {
    const Unit& unit;
    int first_head, num_heads;
    int num;                                                         // queries, [tokens][heads]
    int num_tokens;                                                  // of the row
    alignas(64) T queries[LATENT_ROWS * (MAX_RANK + MAX_ROPE_DIM)];  // tiles of sixteen queries
    alignas(64) float scores[SPLIT * LATENT_ROWS];                   // [key][query]
    alignas(64) T weights[SPLIT * LATENT_ROWS];                      // [key / DEPTH][query][DEPTH]
    alignas(64) T latents[SPLIT * LATENT_TILES * LANES];        // [tile][key / DEPTH][LANES][DEPTH]
    alignas(64) T gathered[SPLIT * (MAX_RANK + MAX_ROPE_DIM)];  // chosen or dequantized entries
    const T* keys[SPLIT / LANES];  // the first of every sixteen entries
    const int32_t* chosen = nullptr;
    int num_chosen = 0;
    float highest[LATENT_ROWS], masses[LATENT_ROWS];
    Shares shares[LATENT_ROWS];
    LatentSums sums[LATENT_ROWS];

    // The arrays stay uninitialized: clearing them would take longer than using them.
    Item(const Unit& unit, int first_head, int num_heads, int num_tokens)
        : unit(unit),
          first_head(first_head),
          num_heads(num_heads),
          num(unit.num_tokens * num_heads),
          num_tokens(num_tokens) {}

    int num_tiles() const { return div_up(num, LANES); }
    const T* key(int place, int entry_dim) const {
      return keys[place / LANES] + place % LANES * entry_dim;
    }
  };

  void run() {
    share(*this, units.count() * div_up(num_heads, heads_at_once));
    if (units.num_partials()) join_partials();
  }

  void operator()(int index) {
    int groups = div_up(num_heads, heads_at_once), head = index % groups * heads_at_once;
    const Unit& unit = units[index / groups];
    int left = num_heads - head;
    Item item(unit, head, left < heads_at_once ? left : heads_at_once,
              (int)(rows.starts[unit.row + 1] - rows.starts[unit.row]));
    open(item);
    if (chosen) choose(item);
    int first = first_key(item) / SPLIT;
    for (int split = first < unit.first_split ? unit.first_split : first; split < unit.end_split;
         split++)
      attend(item, split);
    for (int i = 0; i < item.num; i++) {
      size_t at = place(item, i);
      if (unit.partial < 0)
        finish(item.sums[i], out + at * rank);
      else
        partials[(size_t)unit.partial * num_heads + at % num_heads] = item.sums[i];
    }
  }

  // Packs the queries and zero-pads the last tile.
  void open(Item& item) {
    size_t tile_size = (size_t)LANES * entry_dim;
    memset(item.queries + (item.num_tiles() - 1) * tile_size, 0, tile_size * sizeof(T));
    for (int i = 0; i < item.num; i++) {
      const T* from = query + place(item, i) * entry_dim;
      T* to = item.queries + i / LANES * tile_size + i % LANES * DEPTH<T>;
      for (int k = 0; k < entry_dim; k += DEPTH<T>)
        memcpy(to + (size_t)k * LANES, from + k, DEPTH<T> * sizeof(T));
      item.sums[i].mass = 0;
      item.sums[i].highest = -INFINITE;
    }
  }

  // Index of query i of an item in [tokens, num_heads].
  size_t place(const Item& item, int i) const {
    int64_t token = rows.starts[item.unit.row] + item.unit.token + i / item.num_heads;
    return token * num_heads + item.first_head + i % item.num_heads;
  }

  // Keys of a token that sees more than `topk` are places in its choice.
  void choose(Item& item) const {
    if (end_key(item, 0) <= topk) return;
    item.chosen = chosen + (place(item, 0) / num_heads) * topk;
    while (item.num_chosen < topk && item.chosen[item.num_chosen] >= 0) item.num_chosen++;
  }

  // The key after the last one that query i sees.
  int end_key(const Item& item, int i) const {
    if (item.chosen) return item.num_chosen;
    int after = item.num_tokens - 1 - item.unit.token - i / item.num_heads;
    return (int)rows.num_keys[item.unit.row] - after;
  }

  int first_key(const Item& item) const {
    return rows.first_keys && !item.chosen ? (int)rows.first_keys[item.unit.row] : 0;
  }

  static int within_split(int key, int split) {
    int num = key - split * SPLIT;
    return num < 0 ? 0 : num < SPLIT ? num : SPLIT;
  }

  // Adds one split to the sums of all queries.
  void attend(Item& item, int split) {
    int end = within_split(end_key(item, item.num - 1), split);
    find_keys(item, split, end);
    score(item, end);
    int hidden = within_split(first_key(item), split);
    for (int i = 0; i < item.num; i++) {
      for (int key = 0; key < hidden; key++) item.scores[key * LATENT_ROWS + i] = -INFINITE;
      for (int key = within_split(end_key(item, i), split); key < end; key++)
        item.scores[key * LATENT_ROWS + i] = -INFINITE;
    }
    for (int i = 0; i < item.num; i += LANES) weigh(item, i, end);
    for (int i = 0; i < item.num; i++)
      item.shares[i] = join_masses(item.sums[i], item.highest[i], item.masses[i]);
    for (int tile = 0; tile < rank / LANES; tile += LATENT_TILES) add_latents(item, tile, end);
  }

  void find_keys(Item& item, int split, int end) {
    if (item.chosen || cache.has_codes()) return gather(item, split, end);
    for (int key = 0; key < end; key += LANES)
      item.keys[key / LANES] = (const T*)cache.entry(slot(item, split * SPLIT + key));
  }

  size_t slot(const Item& item, int key) const {
    const int64_t* table = rows.tables + (size_t)item.unit.row * rows.table_stride;
    return table[key / block_size] * block_size + key % block_size;
  }

  void gather(Item& item, int split, int end) const {
    for (int key = 0; key < end; key++) {
      T* to = item.gathered + key * entry_dim;
      int place = split * SPLIT + key;
      cache.read(slot(item, item.chosen ? item.chosen[place] : place), to);
      if (key % LANES == 0) item.keys[key / LANES] = to;
    }
  }

  void score(Item& item, int end) {
    for (int from = 0; from < entry_dim; from += SCORE_DEPTH) {
      int depth = entry_dim - from < SCORE_DEPTH ? entry_dim - from : SCORE_DEPTH;
      for (int key = 0; key < end;) {
        int together = LANES - key % LANES, left = end - key < together ? end - key : together;
        int num = div_up(left, div_up(left, MAX_ROWS));
        const T* keys = item.key(key, entry_dim) + from;
        for (int tile = 0; tile < item.num_tiles(); tile += MAX_TILES) {
          int now = item.num_tiles() - tile < MAX_TILES ? item.num_tiles() - tile : MAX_TILES;
          const T* tiles[MAX_TILES];
          for (int t = 0; t < now; t++)
            tiles[t] = item.queries + ((size_t)(tile + t) * entry_dim + from) * LANES;
          multiply_block<T>(num, now, keys, entry_dim, tiles, depth,
                            item.scores + key * LATENT_ROWS + tile * LANES, LATENT_ROWS, from == 0);
        }
        key += num;
      }
    }
  }

  // Scores of sixteen queries from `first` on → softmax weights, 0 for unseen keys.
  void weigh(Item& item, int first, int end) {
    const float* scores = item.scores + first;
    f32x16 top = spread(-INFINITE), mass = zero(), factor = spread(scale);
    for (int key = 0; key < end; key++) top = max(top, load(scores + key * LATENT_ROWS));
    top = max(mul(top, factor), spread(-__FLT_MAX__));  // finite for a query without visible keys
    f32x16 shift = sub(zero(), top);
    alignas(64) T narrowed[DEPTH<T> * LANES];
    for (int key = 0; key < end; key += DEPTH<T>) {
      for (int d = 0; d < DEPTH<T>; d++) {
        f32x16 weight = zero();
        if (key + d < end) weight = exp(fma(load(scores + (key + d) * LATENT_ROWS), factor, shift));
        mass = add(mass, weight);
        store_narrow(narrowed + d * LANES, weight);
      }
      interleave(narrowed, LANES, item.weights + key * LATENT_ROWS + first * DEPTH<T>);
    }
    store(item.highest + first, top), store(item.masses + first, mass);
  }

  // sums[…].values += weighted latents, for up to LATENT_TILES tiles from `first` on.
  void add_latents(Item& item, int first, int end) {
    int left = rank / LANES - first, num_tiles = left < LATENT_TILES ? left : LATENT_TILES;
    open_latents(item, first, num_tiles, end);
    for (int tile = 0; tile < num_tiles; tile += MAX_TILES) {
      int now = num_tiles - tile < MAX_TILES ? num_tiles - tile : MAX_TILES;
      const T* tiles[MAX_TILES];
      for (int t = 0; t < now; t++) tiles[t] = item.latents + (tile + t) * SPLIT * LANES;
      for (int i = 0; i < item.num;) {
        int num = div_up(item.num - i, div_up(item.num - i, MAX_ROWS));
        add_tiles(item, i, num, (first + tile) * LANES, now, tiles, end);
        i += num;
      }
    }
  }

  // Packs tiles of a split's latents.
  void open_latents(Item& item, int first, int num_tiles, int end) {
    for (int key = 0; key < end; key += DEPTH<T>) {
      const T* from = item.key(key, entry_dim) + first * LANES;
      bool is_last = key + DEPTH<T> > end;  // the second row of the pair is missing
      for (int t = 0; t < num_tiles; t++) {
        T* to = item.latents + (t * SPLIT + key) * LANES;
        if (is_last)
          interleave_last(from + t * LANES, to);
        else
          interleave(from + t * LANES, entry_dim, to);
      }
    }
  }

  // Rescales sums[i …].values from `place` on and adds the weighted latents of `tiles`.
  void add_tiles(Item& item, int i, int num, int place, int num_tiles, const T* const* tiles,
                 int end) {
    with_sizes(num, num_tiles, [&](auto num_rows, auto num_tiles) {
      constexpr int ROWS = num_rows.value, TILES = num_tiles.value;
      f32x16 sums[ROWS][TILES];
      alignas(64) float found[ROWS][TILES * LANES];
      clear<ROWS, TILES>(sums);
      multiply<T, ROWS, TILES, false, LATENT_ROWS>(item.weights + i * DEPTH<T>, DEPTH<T>, tiles,
                                                   end, sums);
      store_sums<ROWS, TILES>(sums, found[0], TILES * LANES);
      for (int r = 0; r < ROWS; r++)
        join_values(item.sums[i + r].values + place, item.shares[i + r], found[r], TILES * LANES);
    });
  }

  static void interleave_last(const T* from, T* to) {
    T row[2 * LANES] = {};
    memcpy(row, from, LANES * sizeof(T));
    interleave(row, LANES, to);
  }

  void finish(const LatentSums& sums, T* to) {
    f32x16 share = spread(1.0f / sums.mass);
    for (int i = 0; i < rank; i += LANES) store_narrow(to + i, mul(load(sums.values + i), share));
  }

  void join_partials() {
    auto of_head = [this](int head) {
      for (int u = 0; u < units.count();) {
        const Unit& unit = units[u++];
        if (unit.partial < 0) continue;
        int num = 1;
        while (u < units.count() && units[u].row == unit.row) u++, num++;
        LatentSums all;
        all.highest = -INFINITE, all.mass = 0;
        for (int i = 0; i < num; i++)
          join(all, partials[(size_t)(unit.partial + i) * num_heads + head], rank);
        finish(all, out + (rows.starts[unit.row] * num_heads + head) * rank);
      }
    };
    share(of_head, num_heads);
  }
};
