// The choice of keys in indexed attention (arXiv 2512.02556): see kernels/index/__init__.py for the
// formula.
//
// A key's score depends on the token and the key only, so that neither the other tokens of a step
// nor the division of a prompt into chunks changes a choice.
#pragma once

#include "attention.h"
#include "heads.h"
#include "select.h"

constexpr int MAX_INDEX_DIM = 256, MAX_INDEX_HEADS = 128;  // also in kernels/cpu/index.py
constexpr int SCORED_TOKENS = 32;                          // tokens with scores at once

struct Index {
  int32_t key, weights, turned;  // buffers; `in`: queries; `turned`: queries after rotation
  int32_t num_heads, dim, rope_dim, topk, is_interleaved;
  float eps, scale;
  const float *norm, *bias;  // [dim]
  const float *cos, *sin;    // [positions, rope_dim]

  void rotate_head(float* head, int64_t position) const {
    rotate(head, cos + position * rope_dim, sin + position * rope_dim, rope_dim, is_interleaved);
  }
};

// The scores of a step's tokens, and the chosen keys. Nothing is chosen for tokens that see no more
// than `topk` keys: they attend to all of them.
template <class T>
struct Indexing {
  const Index& index;
  const Rows& rows;
  const int64_t *positions, *slot_mapping;  // [num_tokens]
  int num_tokens, block_size;
  T* cache;              // [slots, dim]
  const float* query;    // [num_tokens, num_heads, dim]
  const float* key;      // [num_tokens, dim]
  const float* weights;  // [num_tokens, num_heads]
  T* turned;             // [num_tokens, num_heads, dim]
  int32_t* chosen;       // [num_tokens, topk] ascending positions, −1 after the last one

  static inline Scratch<float> room;

  void run() {
    write_keys();
    turn_queries();
    for (int first = 0; first < num_tokens; first += SCORED_TOKENS) {
      int left = num_tokens - first, num = left < SCORED_TOKENS ? left : SCORED_TOKENS, most = 0;
      for (int t = first; t < first + num; t++) most = end_key(t) > most ? end_key(t) : most;
      if (most <= index.topk) continue;
      int num_splits = div_up(most, SPLIT), stride = num_splits * SPLIT;
      float* scores = room.of((size_t)num * stride);
      auto score_split = [=](int item) {
        score(first + item / num_splits, item % num_splits, scores + item / num_splits * stride);
      };
      share(score_split, num * num_splits);
      auto choose_keys = [=](int i) { choose(first + i, scores + (size_t)i * stride); };
      share(choose_keys, num);
    }
  }

  int end_key(int t) const {
    int row = row_of(rows, t);
    return (int)(rows.num_keys[row] - (rows.starts[row + 1] - 1 - t));
  }

  // Layer norm, rotation of the first part.
  void write_keys() const {
    int dim = index.dim;
    each_row(num_tokens, dim, [=](size_t at) {
      int t = (int)(at / dim);
      alignas(64) float head[MAX_INDEX_DIM];
      f32x16 total = zero(), squares = zero();
      for (int i = 0; i < dim; i += LANES) total = add(total, load(key + at + i));
      f32x16 mean = spread(sum(total) / dim);
      for (int i = 0; i < dim; i += LANES) {
        f32x16 off = sub(load(key + at + i), mean);
        squares = fma(off, off, squares);
      }
      f32x16 factor = norm_scale(sum(squares), dim, index.eps);
      for (int i = 0; i < dim; i += LANES) {
        f32x16 normed = mul(sub(load(key + at + i), mean), factor);
        store(head + i, fma(normed, load(index.norm + i), load(index.bias + i)));
      }
      index.rotate_head(head, positions[t]);
      T* to = cache + slot_mapping[t] * dim;
      for (int i = 0; i < dim; i += LANES) store_narrow(to + i, load(head + i));
    });
  }

  void turn_queries() const {
    int dim = index.dim, size = index.num_heads * dim;
    each_row(num_tokens, size, [=](size_t at) {
      alignas(64) float head[MAX_INDEX_DIM];
      for (int h = 0; h < size; h += dim) {
        memcpy(head, query + at + h, dim * sizeof(float));
        index.rotate_head(head, positions[at / size]);
        for (int i = 0; i < dim; i += LANES) store_narrow(turned + at + h + i, load(head + i));
      }
    });
  }

  // Σ over heads of weight · relu(query · key), for a split of the keys that token t sees.
  void score(int t, int split, float* scores) const {
    int end = end_key(t), first = split * SPLIT, num_heads = index.num_heads, dim = index.dim;
    if (end <= index.topk || first >= end) return;
    alignas(64) T queries[MAX_INDEX_HEADS * MAX_INDEX_DIM];  // tiles of sixteen heads
    alignas(64) float shares[MAX_INDEX_HEADS], found[MAX_ROWS * MAX_TILES * LANES];
    for (int h = 0; h < num_heads; h++) {
      const T* from = turned + ((size_t)t * num_heads + h) * dim;
      T* to = queries + h / LANES * LANES * dim + h % LANES * DEPTH<T>;
      for (int k = 0; k < dim; k += DEPTH<T>)
        memcpy(to + k * LANES, from + k, DEPTH<T> * sizeof(T));
    }
    for (int h = 0; h < num_heads; h += LANES)
      store(shares + h, mul(load(weights + (size_t)t * num_heads + h), spread(index.scale)));
    const int64_t* table = rows.tables + (size_t)row_of(rows, t) * rows.table_stride;
    int until = first + SPLIT < end ? first + SPLIT : end;
    for (int key = first; key < until;) {
      int left = LANES - key % LANES;  // keys of a block are side by side
      left = left < until - key ? left : until - key;
      int num = div_up(left, div_up(left, MAX_ROWS));
      const T* from = cache + (table[key / block_size] * block_size + key % block_size) * dim;
      f32x16 totals[MAX_ROWS];
      for (int i = 0; i < num; i++) totals[i] = zero();
      for (int tile = 0; tile < num_heads / LANES; tile += MAX_TILES) {
        int rest = num_heads / LANES - tile, now = rest < MAX_TILES ? rest : MAX_TILES;
        const T* tiles[MAX_TILES];
        for (int j = 0; j < now; j++) tiles[j] = queries + (tile + j) * LANES * dim;
        multiply_block<T>(num, now, from, dim, tiles, dim, found, now * LANES);
        for (int i = 0; i < num; i++)
          for (int j = 0; j < now; j++) {
            f32x16 product = max(zero(), load(found + (i * now + j) * LANES));  // keeps a NaN
            totals[i] = fma(product, load(shares + (tile + j) * LANES), totals[i]);
          }
      }
      for (int i = 0; i < num; i++) scores[key + i] = sum(totals[i]);
      key += num;
    }
  }

  // The keys with the `topk` highest scores; of equal ones the first. A NaN is never chosen.
  void choose(int t, const float* scores) const {
    int end = end_key(t), topk = index.topk, num = 0;
    if (end <= topk) return;
    int row = row_of(rows, t), first = rows.first_keys ? (int)rows.first_keys[row] : 0;
    int32_t* to = chosen + (size_t)t * topk;
    if (end - first <= topk) {
      for (int key = first; key < end; key++) to[num++] = key;
    } else {
      float least = kth_highest(scores + first, end - first, topk, scratch(end - first));
      int num_equal = topk;
      for (int key = first; key < end; key++) num_equal -= scores[key] > least;
      for (int key = first; key < end; key++)
        if (scores[key] > least || (scores[key] == least && num_equal-- > 0)) to[num++] = key;
    }
    for (; num < topk; num++) to[num] = -1;
  }
};
