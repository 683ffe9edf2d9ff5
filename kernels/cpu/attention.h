// Attention of a step's tokens over the paged KV cache.
//
// Keys are processed SPLIT at a time: scores, their maximum, softmax weights, weighted sum of
// values. The splits are then joined in order (online softmax, Dao et al., arXiv 2205.14135). A
// token's result depends on its own keys only, not on the other tokens and rows of its step;
// division of a long row among threads does not change it.
#pragma once

#include <stdlib.h>

#include "cache.h"
#include "product.h"

constexpr int SPLIT = 256;     // keys; a multiple of 16
constexpr int AT_ONCE = 64;    // keys; a multiple of 16
constexpr int UNIT_ROWS = 48;  // queries of a unit: tokens × heads that share keys

struct Rows {
  int num_rows;
  const int64_t* starts;    // [num_rows + 1], first token of each row in the step
  const int64_t* num_keys;  // [num_rows], of the row's last token
  const int64_t* tables;    // [num_rows, table_stride], block tables
  int table_stride;
  const int64_t* first_keys;  // [num_rows]: earlier keys are hidden; or null
  // [tokens]: tokens of images see their row's keys up to this place, others up to their own; not
  // descending in a row. Or null: there are none.
  const int64_t* ends;

  // The key after the last one that a token sees which stands at `own` in its row.
  int end_of(int64_t token, int own) const {
    return ends && ends[token] > own + 1 ? (int)ends[token] : own + 1;
  }
};

// The row of token t.
inline int row_of(const Rows& rows, int t) {
  int first = 0, end = rows.num_rows;
  while (end - first > 1) {
    int middle = (first + end) / 2;
    if (rows.starts[middle] <= t)
      first = middle;
    else
      end = middle;
  }
  return first;
}

// Consecutive tokens of a row, and a range of splits of its keys.
struct Unit {
  int row, token, num_tokens;
  int first_split, end_split;
  int partial;  // index of its partial sums if the row's splits are divided, else −1
};

// Sums of one query over some splits: the highest score, Σ e^(score − highest), Σ of weighted
// values.
template <int SIZE>
struct SumsOf {
  float highest, mass;
  float values[SIZE];
};
typedef SumsOf<MAX_HEAD_DIM> Sums;

INLINE float exp_of(float x) {
  alignas(64) float y[LANES];
  store(y, exp(spread(x)));
  return y[0];
}

// Factors that rescale the old and the added sums to a common highest score.
struct Shares {
  float old, added;
};

// Adds the highest score and the mass of a later split to `sums`.
template <class Sums>
INLINE Shares join_masses(Sums& sums, float highest, float mass) {
  if (mass == 0) return {1, 0};
  float top = sums.highest > highest ? sums.highest : highest;
  Shares shares = {sums.mass == 0 ? 0 : exp_of(sums.highest - top), exp_of(highest - top)};
  sums.mass = sums.mass * shares.old + mass * shares.added;
  sums.highest = top;
  return shares;
}

// values [dim] = values · shares.old + next [dim] · shares.added
INLINE void join_values(float* values, Shares shares, const float* next, int dim) {
  if (shares.added == 0) return;
  for (int i = 0; i < dim; i += LANES) {
    f32x16 added = mul(load(next + i), spread(shares.added));
    if (shares.old != 0) added = fma(load(values + i), spread(shares.old), added);
    store(values + i, added);
  }
}

// Copies sums with `dim` values.
template <class Sums>
INLINE void copy(const Sums& from, int dim, Sums& to) {
  to.highest = from.highest, to.mass = from.mass;
  memcpy(to.values, from.values, dim * sizeof(float));
}

// Adds the sums of a later split, `next`, to `sums`.
template <class Sums>
INLINE void join(Sums& sums, const Sums& next, int dim) {
  Shares shares = join_masses(sums, next.highest, next.mass);
  join_values(sums.values, shares, next.values, dim);
}

// The units of a step, equal for all layers of one shape, and the number of KV heads per item. An
// item with all KV heads reads the cache in memory order. A unit has up to `unit_rows` queries per
// KV head, `group_size` for each token. Divided rows have no units for splits before the window
// (see Attention). A token attends to `most` keys, or to all if that is 0.
class Units {
 public:
  void prepare(const Rows& rows, int group_size, int num_kv_heads, int unit_rows = UNIT_ROWS,
               int window = 0, int most = 0) {
    count_ = num_partials_ = 0;
    int num_wanted = 4 * pool_size();
    bool divides = rows.num_rows * num_kv_heads < num_wanted;
    int step = unit_rows / group_size, widest = 1;
    for (int row = 0; row < rows.num_rows; row++) {
      int num_tokens = (int)(rows.starts[row + 1] - rows.starts[row]);
      int num_keys = (int)rows.num_keys[row], end = div_up(within(most, num_keys), SPLIT);
      int first = window && window < num_keys ? (num_keys - window) / SPLIT : 0;
      if (num_tokens == 1 && divides && end - first > 1) {
        for (int split = first; split < end; split++)
          add({row, 0, 1, split, split + 1, num_partials_++});
        continue;
      }
      for (int token = 0; token < num_tokens; token += step) {
        int num = token + step < num_tokens ? step : num_tokens - token;
        int own = num_keys - (num_tokens - token - num) - 1;
        int num_seen = rows.end_of(rows.starts[row] + token + num - 1, own);
        add({row, token, num, 0, div_up(within(most, num_seen), SPLIT), -1});
        widest = num > widest ? num : widest;
      }
    }
    num_heads_ = num_kv_heads;
    while (num_heads_ > 1 && (num_heads_ * group_size * widest > unit_rows ||
                              count_ * div_up(num_kv_heads, num_heads_) < num_wanted))
      num_heads_ = div_up(num_heads_, 2);
  }

  int num_heads() const { return num_heads_; }
  int count() const { return count_; }
  const Unit& operator[](int index) const { return units_[index]; }
  int num_partials() const { return num_partials_; }

 private:
  static int within(int most, int num_keys) { return most && most < num_keys ? most : num_keys; }

  void add(Unit unit) {
    if (count_ == room_) {
      room_ = 2 * room_ + 64;
      units_ = (Unit*)realloc(units_, room_ * sizeof(Unit));
    }
    units_[count_++] = unit;
  }

  Unit* units_ = nullptr;
  int count_ = 0, room_ = 0, num_partials_ = 0, num_heads_ = 1;
};

// T is the type of queries and weights, W the type of the cache.
template <class T, class W>
struct Attention {
  Rows rows;
  Cache<W> cache;
  const Units& units;
  const T* query;  // [tokens, num_heads, head_dim]
  T* out;          // [tokens, num_heads, head_dim]
  Sums* partials;  // [units.num_partials(), num_heads]
  int num_heads;
  float scale;
  int window;          // a token sees the last `window` keys; 0: all keys
  float softcap;       // score → softcap · tanh(score / softcap); 0: off
  const float* sinks;  // [num_heads], an extra score per head, without a value; or null

  // One item of a thread: a unit's queries of some KV heads, head by head.
  struct Item {
    const Unit& unit;
    int first_head, num_kv_heads;  // KV heads
    int per_head;                  // queries per KV head
    int num_tokens;                // of the row
    alignas(64) T queries[UNIT_ROWS * MAX_HEAD_DIM];
    alignas(64) T weights[UNIT_ROWS * SPLIT];
    alignas(64) float scores[UNIT_ROWS * SPLIT];
    alignas(64) T widened[Cache<W>::HAS_CODES ? AT_ONCE * MAX_HEAD_DIM : 1];  // of one head
    Sums sums[UNIT_ROWS], found[UNIT_ROWS];

    // The arrays stay uninitialized: clearing them would take longer than using them.
    Item(const Unit& unit, int first_head, int num_kv_heads, int per_head, int num_tokens)
        : unit(unit),
          first_head(first_head),
          num_kv_heads(num_kv_heads),
          per_head(per_head),
          num_tokens(num_tokens) {}
  };

  int group_size() const { return num_heads / cache.num_kv_heads; }

  void run() {
    share(*this, units.count() * div_up(cache.num_kv_heads, units.num_heads()));
    if (units.num_partials()) join_partials();
  }

  void operator()(int index) {
    int groups = div_up(cache.num_kv_heads, units.num_heads()), dim = cache.head_dim;
    const Unit& unit = units[index / groups];
    int head = index % groups * units.num_heads(), left = cache.num_kv_heads - head;
    int num_tokens = (int)(rows.starts[unit.row + 1] - rows.starts[unit.row]);
    Item item(unit, head, left < units.num_heads() ? left : units.num_heads(),
              unit.num_tokens * group_size(), num_tokens);
    int num = item.num_kv_heads * item.per_head;
    for (int i = 0; i < num; i++) {
      memcpy(item.queries + i * dim, query + place(item, i) * dim, dim * sizeof(T));
      item.sums[i].mass = 0;
      item.sums[i].highest = -__builtin_inff();
    }
    int first = first_key(item, 0) / SPLIT;
    for (int split = first < unit.first_split ? unit.first_split : first; split < unit.end_split;
         split++)
      attend(item, split);
    for (int i = 0; i < num; i++) {
      int of_query = (int)(place(item, i) % num_heads);
      if (unit.partial < 0)
        finish(item.sums[i], of_query, out + place(item, i) * dim);
      else
        copy(item.sums[i], dim, partials[(size_t)unit.partial * num_heads + of_query]);
    }
  }

  // The token of query i of an item, counted from the row's first one.
  int token_of(const Item& item, int i) const {
    return item.unit.token + i % item.per_head / group_size();
  }

  // Index of query i of an item in [tokens, num_heads].
  size_t place(const Item& item, int i) const {
    int group = group_size(), head = item.first_head + i / item.per_head;
    int64_t token = rows.starts[item.unit.row] + token_of(item, i);
    return token * num_heads + head * group + i % group;
  }

  // The key of query i itself.
  int own_key(const Item& item, int i) const {
    return (int)rows.num_keys[item.unit.row] - (item.num_tokens - token_of(item, i));
  }

  // The key after the last one that query i sees.
  int end_key(const Item& item, int i) const {
    return rows.end_of(rows.starts[item.unit.row] + token_of(item, i), own_key(item, i));
  }

  // The first key that query i sees.
  int first_key(const Item& item, int i) const {
    int first = rows.first_keys ? (int)rows.first_keys[item.unit.row] : 0;
    int of_window = window ? own_key(item, i) + 1 - window : 0;
    return of_window > first ? of_window : first;
  }

  // Keys of the split up to the last one that query i sees, including hidden ones.
  int num_seen(const Item& item, int i, int split) const {
    return within_split(end_key(item, i), split);
  }

  // Keys at the start of the split that are hidden from query i.
  int num_hidden(const Item& item, int i, int split) const {
    return within_split(first_key(item, i), split);
  }

  // Offset in the split at which reading starts: no query sees an earlier key.
  int first_read(const Item& item, int split) const {
    return num_hidden(item, 0, split) / AT_ONCE * AT_ONCE;
  }

  static int within_split(int key, int split) {
    int num = key - split * SPLIT;
    return num < 0 ? 0 : num < SPLIT ? num : SPLIT;
  }

  // Adds one split to the sums of all queries. AT_ONCE keys are multiplied with the queries of all
  // heads before the next keys are read; the same holds for values.
  void attend(Item& item, int split) {
    int num = item.num_kv_heads * item.per_head, dim = cache.head_dim;
    int begin = first_read(item, split), longest = num_seen(item, item.per_head - 1, split);
    for (int key = begin; key < longest; key += AT_ONCE)
      each_block(item, split, key, 0, [&](const Tiles& keys, int first, int num) {
        score(item, split, key, keys, first, num);
      });
    for (int i = 0; i < num; i++) {
      int seen = num_seen(item, i, split), hidden = num_hidden(item, i, split);
      if (softcap) cap(item.scores + i * SPLIT, begin, seen);
      for (int key = begin; key < hidden; key++) item.scores[i * SPLIT + key] = -__builtin_inff();
      weigh(item, split, i, begin, hidden < seen ? seen : begin);
      memset(item.found[i].values, 0, dim * sizeof(float));
    }
    for (int key = begin; key < longest; key += AT_ONCE)
      each_block(item, split, key, cache.num_kv_heads,
                 [&](const Tiles& values, int first, int num) {
                   add_values(item, split, key, values, first, num);
                 });
    for (int i = 0; i < num; i++) join(item.sums[i], item.found[i], dim);
  }

  // Tiles of keys or values of one head.
  struct Tiles {
    int num;
    const T* numbers[AT_ONCE / LANES];
    const float* scales[AT_ONCE / LANES];
  };

  // Calls f(tiles, first, num) for the tiles of each head from `key` on and each block of up to
  // MAX_ROWS queries, except blocks in which no query sees `key`. Planes of keys start at 0, planes
  // of values at num_kv_heads.
  template <class F>
  void each_block(Item& item, int split, int key, int plane, F f) {
    int longest = num_seen(item, item.per_head - 1, split);
    for (int head = 0; head < item.num_kv_heads; head++) {
      Tiles tiles = open(item, split, key, longest, plane + item.first_head + head);
      for (int i = 0; i < item.per_head;) {
        int num = div_up(item.per_head - i, div_up(item.per_head - i, MAX_ROWS));
        if (num_seen(item, i + num - 1, split) > key) f(tiles, head * item.per_head + i, num);
        i += num;
      }
    }
  }

  // Tiles from `key` of the split on, in the model's type. The next tiles are prefetched meanwhile,
  // interleaved with dequantization if there is any: blocks are scattered in memory, so the CPU
  // cannot predict them.
  Tiles open(Item& item, int split, int key, int longest, int plane) {
    const W *stored[AT_ONCE / LANES], *next[AT_ONCE / LANES];
    Tiles tiles;
    tiles.num = tiles_of(item, split, key, longest, plane, stored, tiles.scales);
    int num_next = next_tiles(item, split, key, longest, plane, next), num_asked = 0;
    if constexpr (Cache<W>::HAS_CODES) {
      for (int t = 0; t < tiles.num; t++) {
        T* widened = item.widened + t * cache.tile_size();
        tiles.numbers[t] = widened;
        widen_tile(stored[t], cache.head_dim, widened, t < num_next ? next[t] : stored[t]);
      }
      num_asked = tiles.num;
    } else {
      for (int t = 0; t < tiles.num; t++) tiles.numbers[t] = stored[t];
    }
    for (int t = num_asked; t < num_next; t++)
      for (size_t i = 0; i < cache.tile_size(); i += 64 / sizeof(W)) prefetch(next[t] + i);
    return tiles;
  }

  // Tiles from `key` of the split on, and their scales; returns the number of tiles.
  int tiles_of(const Item& item, int split, int key, int longest, int plane, const W** tiles,
               const float** scales) {
    int per_block = cache.block_size / LANES, num = div_up(longest - key, LANES);
    num = num < AT_ONCE / LANES ? num : AT_ONCE / LANES;
    const int64_t* table = rows.tables + (size_t)item.unit.row * rows.table_stride;
    for (int t = 0; t < num; t++) {
      int tile = (split * SPLIT + key) / LANES + t;
      int64_t block = table[tile / per_block];
      tiles[t] = cache.tile(block, plane, tile % per_block);
      if (Cache<W>::HAS_CODES) scales[t] = cache.tile_scales(block, plane, tile % per_block);
    }
    return num;
  }

  // The tiles to open after the ones from `key` on: values follow keys, and keys of the next split
  // follow values.
  int next_tiles(const Item& item, int split, int key, int longest, int plane, const W** tiles) {
    key += AT_ONCE;
    if (key >= longest && plane < cache.num_kv_heads) {
      key = first_read(item, split), plane += cache.num_kv_heads;
    } else if (key >= longest) {
      if (++split == item.unit.end_split) return 0;
      key = 0, plane -= cache.num_kv_heads, longest = num_seen(item, item.per_head - 1, split);
    }
    const float* scales[AT_ONCE / LANES];
    int num = tiles_of(item, split, key, longest, plane, tiles, scales);
    if (Cache<W>::HAS_CODES)
      for (int t = 0; t < num; t++) prefetch(scales[t]);
    return num;
  }

  void score(Item& item, int split, int key, const Tiles& keys, int first, int num) {
    int seen = div_up(num_seen(item, first + num - 1, split) - key, LANES), dim = cache.head_dim;
    int num_tiles = seen < keys.num ? seen : keys.num;
    float* scores = item.scores + first * SPLIT + key;
    for (int t = 0; t < num_tiles; t += MAX_TILES) {
      int now = num_tiles - t < MAX_TILES ? num_tiles - t : MAX_TILES;
      multiply_block<T>(num, now, item.queries + first * dim, dim, keys.numbers + t, dim,
                        scores + t * LANES, SPLIT);
    }
    if (Cache<W>::HAS_CODES)
      for (int i = 0; i < num; i++)
        for (int t = 0; t < num_tiles; t++) {
          float* of_tile = scores + i * SPLIT + t * LANES;
          store(of_tile, mul(load(of_tile), load(keys.scales[t])));
        }
  }

  // score → softcap · tanh(scale · score / softcap)
  void cap(float* scores, int begin, int end) const {
    f32x16 inner = spread(scale / softcap), outer = spread(softcap);
    for (int key = begin; key < end; key += LANES)
      store(scores + key, mul(tanh(mul(load(scores + key), inner)), outer));
  }

  // Scores of query i from `begin` on → softmax weights relative to their maximum, 0 for unseen
  // keys. For a quantized cache, the weights include the scales of the values.
  void weigh(Item& item, int split, int i, int begin, int num_seen) {
    float* scores = item.scores + i * SPLIT;
    T* weights = item.weights + i * SPLIT;
    const f32x16 hidden = spread(-__builtin_inff());
    f32x16 top = hidden, mass = zero();
    if (int num_rest = num_seen % LANES) {
      float* rest = scores + num_seen - num_rest;
      store(rest, first(num_rest, load(rest), hidden));
    }
    int end = div_up(num_seen, LANES) * LANES;
    for (int key = begin; key < end; key += LANES) top = max(top, load(scores + key));
    Sums& found = item.found[i];
    float left = softcap ? 1 : scale;
    found.highest = highest(top) * left;
    f32x16 shift = spread(-found.highest), factor = spread(left);
    for (int key = begin; key < end; key += LANES) {
      f32x16 weight = exp(fma(load(scores + key), factor, shift));
      mass = add(mass, weight);
      if (Cache<W>::HAS_CODES) weight = scaled(item, split, i, key, num_seen, weight);
      store_narrow(weights + key, weight);
    }
    for (int key = end; key < SPLIT; key += LANES) store_narrow(weights + key, zero());
    found.mass = num_seen > begin ? sum(mass) : 0;
  }

  // Weights of a tile's keys times the scales of their values. Unwritten scales may be NaN: their
  // products are replaced by 0.
  f32x16 scaled(const Item& item, int split, int i, int key, int num_seen, f32x16 weight) {
    const W* tile;
    const float* scales;
    int plane = cache.num_kv_heads + item.first_head + i / item.per_head;
    tiles_of(item, split, key, key + LANES, plane, &tile, &scales);
    f32x16 product = mul(weight, load(scales));
    return num_seen - key < LANES ? first(num_seen - key, product, zero()) : product;
  }

  // found[…].values += weights · values from `key` on.
  void add_values(Item& item, int split, int key, const Tiles& values, int first, int num) {
    int longest = num_seen(item, first + num - 1, split);
    int end = longest < key + AT_ONCE ? longest : key + AT_ONCE;
    for (int d = 0; d < cache.head_dim; d += MAX_TILES * LANES) {
      int left = (cache.head_dim - d) / LANES;
      with_sizes(num, left < MAX_TILES ? left : MAX_TILES, [&](auto num_rows, auto num_tiles) {
        constexpr int ROWS = num_rows.value, TILES = num_tiles.value;
        f32x16 sums[ROWS][TILES];
        float* place = item.found[first].values + d;
        constexpr size_t STRIDE = sizeof(Sums) / sizeof(float);
        load_sums<ROWS, TILES>(sums, place, STRIDE);
        for (int at = key; at < end; at += LANES) {
          const T* pieces[TILES];
          for (int t = 0; t < TILES; t++)
            pieces[t] = values.numbers[(at - key) / LANES] + (d + t * LANES) * LANES;
          multiply<T, ROWS, TILES>(item.weights + first * SPLIT + at, SPLIT, pieces,
                                   end - at < LANES ? end - at : LANES, sums);
        }
        store_sums<ROWS, TILES>(sums, place, STRIDE);
      });
    }
  }

  void finish(const Sums& sums, int head, T* to) {
    f32x16 share = spread(1.0f / (sinks ? mass_with(sinks[head], sums) : sums.mass));
    for (int i = 0; i < cache.head_dim; i += LANES)
      store_narrow(to + i, mul(load(sums.values + i), share));
  }

  // The mass with `sink` as a further score.
  static float mass_with(float sink, const Sums& sums) {
    return sums.mass + exp_of(sink - sums.highest);
  }

  void join_partials() {
    for (int u = 0; u < units.count();) {
      const Unit& unit = units[u++];
      if (unit.partial < 0) continue;
      int num = 1;
      while (u < units.count() && units[u].row == unit.row) u++, num++;
      T* to = out + rows.starts[unit.row] * num_heads * cache.head_dim;
      for (int head = 0; head < num_heads; head++) {
        Sums all = {-__builtin_inff(), 0, {}};
        for (int i = 0; i < num; i++)
          join(all, partials[(size_t)(unit.partial + i) * num_heads + head], cache.head_dim);
        finish(all, head, to + (size_t)head * cache.head_dim);
      }
    }
  }
};
