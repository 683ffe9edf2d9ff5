// Attention of a step's tokens over the paged cache.
//
// Keys are taken SPLIT at a time: scores, their maximum, weights, and the weighted sum of values;
// the splits are then put together in order (Dao et al., arXiv 2205.14135). So a token's result
// depends on its own keys only, not on how many tokens or rows share its step, and a long row may
// be divided among threads without changing it.
#pragma once

#include <stdlib.h>

#include "heads.h"

constexpr int SPLIT = 256;  // keys; a multiple of 16
constexpr int MAX_HEAD_DIM = 256;
constexpr int UNIT_ROWS = 48;  // queries of a unit: tokens × heads that share keys

struct Rows {
  int num_rows;
  const int64_t* starts;    // [num_rows + 1], of their tokens in the step
  const int64_t* num_keys;  // [num_rows], of the last token
  const int64_t* tables;    // [num_rows, table_stride], their blocks
  int table_stride;
};

// Some tokens of a row, and the splits of its keys that they are to see.
struct Unit {
  int row, token, num_tokens;
  int first_split, end_split;
  int partial;  // where its sums go if others have the other splits, else −1
};

// What one query has of some splits: the highest score, Σ e^(score − highest), Σ of weighted
// values.
struct Sums {
  float highest, mass;
  float values[MAX_HEAD_DIM];
};

INLINE float exp_of(float x) {
  alignas(64) float y[LANES];
  store(y, exp(spread(x)));
  return y[0];
}

// Puts `next` behind `sums`.
INLINE void join(Sums& sums, const Sums& next, int dim) {
  if (next.mass == 0) return;
  float top = sums.highest > next.highest ? sums.highest : next.highest;
  float old_share = sums.mass == 0 ? 0 : exp_of(sums.highest - top);
  float new_share = exp_of(next.highest - top);
  sums.mass = sums.mass * old_share + next.mass * new_share;
  for (int i = 0; i < dim; i += LANES) {
    f32x16 added = mul(load(next.values + i), spread(new_share));
    if (old_share != 0) added = fma(load(sums.values + i), spread(old_share), added);
    store(sums.values + i, added);
  }
  sums.highest = top;
}

// The units of a step, for all layers alike.
class Units {
 public:
  void prepare(const Rows& rows, int group_size, int num_kv_heads) {
    count_ = num_partials_ = 0;
    int num_shared = rows.num_rows * num_kv_heads;
    bool divides = num_shared < 4 * pool_size();
    for (int row = 0; row < rows.num_rows; row++) {
      int num_tokens = (int)(rows.starts[row + 1] - rows.starts[row]);
      int num_splits = div_up((int)rows.num_keys[row], SPLIT);
      int step = UNIT_ROWS / group_size > 1 ? UNIT_ROWS / group_size : 1;
      if (num_tokens == 1 && divides && num_splits > 1) {
        for (int split = 0; split < num_splits; split++)
          add({row, 0, 1, split, split + 1, num_partials_ + split});
        num_partials_ += num_splits;
        continue;
      }
      for (int token = 0; token < num_tokens; token += step) {
        int num = token + step < num_tokens ? step : num_tokens - token;
        int num_seen = (int)rows.num_keys[row] - (num_tokens - token - num);
        add({row, token, num, 0, div_up(num_seen, SPLIT), -1});
      }
    }
  }

  int count() const { return count_; }
  const Unit& operator[](int index) const { return units_[index]; }
  int num_partials() const { return num_partials_; }

 private:
  void add(Unit unit) {
    if (count_ == room_) {
      room_ = 2 * room_ + 64;
      units_ = (Unit*)realloc(units_, room_ * sizeof(Unit));
    }
    units_[count_++] = unit;
  }

  Unit* units_ = nullptr;
  int count_ = 0, room_ = 0, num_partials_ = 0;
};

template <class T>
struct Attention {
  Rows rows;
  Cache<T> cache;
  const Units& units;
  const T* query;  // [tokens, num_heads, head_dim]
  T* out;          // the same
  Sums* partials;  // [units.num_partials(), num_heads]
  int num_heads;
  float scale;

  int group_size() const { return num_heads / cache.num_kv_heads; }

  void run() {
    share(*this, units.count() * cache.num_kv_heads);
    if (units.num_partials()) join_partials();
  }

  void operator()(int item) {
    const Unit& unit = units[item / cache.num_kv_heads];
    int kv_head = item % cache.num_kv_heads, dim = cache.head_dim, group = group_size();
    int num = unit.num_tokens * group;
    int64_t token = rows.starts[unit.row] + unit.token;
    alignas(64) T queries[UNIT_ROWS * MAX_HEAD_DIM];
    Sums sums[UNIT_ROWS];
    for (int i = 0; i < num; i++) {
      size_t head = (token + i / group) * num_heads + kv_head * group + i % group;
      memcpy(queries + i * dim, query + head * dim, dim * sizeof(T));
      sums[i].mass = 0;
      sums[i].highest = -__builtin_inff();
    }
    for (int split = unit.first_split; split < unit.end_split; split++)
      for (int i = 0; i < num;) {
        int block = div_up(num - i, div_up(num - i, MAX_ROWS));
        attend(unit, kv_head, split, queries, i, block, sums);
        i += block;
      }
    for (int i = 0; i < num; i++) {
      size_t head = kv_head * group + i % group;
      if (unit.partial < 0)
        finish(sums[i], out + ((token + i / group) * num_heads + head) * dim);
      else
        partials[(size_t)unit.partial * num_heads + head] = sums[i];
    }
  }

  // Adds what `num` queries from `first` on see in one split.
  void attend(const Unit& unit, int kv_head, int split, const T* queries, int first, int num,
              Sums* sums) {
    int group = group_size(), dim = cache.head_dim, start = split * SPLIT;
    int num_tokens = (int)(rows.starts[unit.row + 1] - rows.starts[unit.row]);
    auto num_seen = [&](int index) {
      int token = unit.token + index / group;
      int seen = (int)rows.num_keys[unit.row] - (num_tokens - 1 - token) - start;
      return seen < 0 ? 0 : seen < SPLIT ? seen : SPLIT;
    };
    int longest = num_seen(first + num - 1);
    if (longest == 0) return;
    const T *keys[SPLIT / LANES], *values[SPLIT / LANES];
    int num_tiles = div_up(longest, LANES), tiles_per_block = cache.block_size / LANES;
    const int64_t* table = rows.tables + (size_t)unit.row * rows.table_stride;
    for (int t = 0; t < num_tiles; t++) {
      int tile = start / LANES + t;
      int64_t block = table[tile / tiles_per_block];
      keys[t] = cache.keys(block, kv_head, tile % tiles_per_block);
      values[t] = cache.values(block, kv_head, tile % tiles_per_block);
    }
    alignas(64) float scores[MAX_ROWS][SPLIT];
    alignas(64) T weights[MAX_ROWS][SPLIT];
    size_t tile_bytes = cache.tile_size() * sizeof(T);
    for (int t = 0; t < num_tiles; t += MAX_TILES) {
      int now = num_tiles - t < MAX_TILES ? num_tiles - t : MAX_TILES;
      // Blocks lie anywhere, so the CPU cannot guess what comes next.
      for (int i = t; i < t + now; i++) {
        if (i + MAX_TILES < num_tiles) prefetch(keys[i + MAX_TILES], tile_bytes);
        prefetch(values[i], tile_bytes);
      }
      multiply_block<T>(num, now, queries + first * dim, dim, keys + t, dim, scores[0] + t * LANES,
                        SPLIT);
    }
    Sums found[MAX_ROWS];
    for (int i = 0; i < num; i++)
      weigh(scores[i], num_seen(first + i), longest, found[i], weights[i]);
    add_values(weights, values, longest, num, found);
    for (int i = 0; i < num; i++) join(sums[first + i], found[i], dim);
  }

  // Scores → weights [longest, filled up to whole tiles], 0 for what the query does not see.
  void weigh(float* scores, int num_seen, int longest, Sums& found, T* weights) {
    const f32x16 hidden = spread(-__builtin_inff());
    f32x16 top = hidden, mass = zero();
    int num_tiles = div_up(longest, LANES), num_rest = num_seen % LANES;
    if (num_rest) {
      float* rest = scores + num_seen - num_rest;
      store(rest, first(num_rest, load(rest), hidden));
    }
    int num_used = div_up(num_seen, LANES);
    for (int t = 0; t < num_used; t++) top = max(top, load(scores + t * LANES));
    found.highest = highest(top) * scale;
    f32x16 shift = spread(-found.highest), factor = spread(scale);
    for (int t = 0; t < num_used; t++) {
      f32x16 weight = exp(fma(load(scores + t * LANES), factor, shift));
      mass = add(mass, weight);
      store_narrow(weights + t * LANES, weight);
    }
    for (int t = num_used; t < num_tiles; t++) store_narrow(weights + t * LANES, zero());
    found.mass = num_seen ? sum(mass) : 0;
  }

  // found[…].values = the weighted sums of the values of `num_keys` keys.
  void add_values(const T (*weights)[SPLIT], const T* const* tiles, int num_keys, int num,
                  Sums* found) {
    for (int d = 0; d < cache.head_dim; d += MAX_TILES * LANES) {
      int left = (cache.head_dim - d) / LANES;
      with_sizes(num, left < MAX_TILES ? left : MAX_TILES, [=](auto num_rows, auto num_tiles) {
        constexpr int ROWS = num_rows.value, TILES = num_tiles.value;
        f32x16 sums[ROWS][TILES];
        clear<ROWS, TILES>(sums);
        for (int key = 0; key < num_keys; key += LANES) {
          const T* pieces[TILES];
          for (int t = 0; t < TILES; t++) pieces[t] = tiles[key / LANES] + (d + t * LANES) * LANES;
          int some = num_keys - key < LANES ? num_keys - key : LANES;
          multiply<T, ROWS, TILES>(weights[0] + key, SPLIT, pieces, some, sums);
        }
        for (int r = 0; r < ROWS; r++)
          for (int t = 0; t < TILES; t++) store(found[r].values + d + t * LANES, sums[r][t]);
      });
    }
  }

  void finish(const Sums& sums, T* to) {
    f32x16 share = spread(1.0f / sums.mass);
    for (int i = 0; i < cache.head_dim; i += LANES)
      store_narrow(to + i, mul(load(sums.values + i), share));
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
        finish(all, to + (size_t)head * cache.head_dim);
      }
    }
  }
};
