// The gated delta rule over the states of sequences: see kernels/delta/__init__.py for the formula.
//
// An item is a row and a key head, with its value heads. It runs over the tokens of the row in
// order, so that its sums depend neither on the cut of a prompt nor on other rows. The items of a
// row share states and kept drafts; each reads and writes its own heads and channels only.
#pragma once

#include "heads.h"
#include "words.h"

constexpr int MAX_KEY_DIM = 256, MAX_VALUE_DIM = 256, MAX_WIDTH = 8;  // as in delta.py
constexpr float EPS_OF_KEYS = 1e-6f;  // of the norms of queries and keys

// Vectors of columns in a pass over a matrix [key_dim, value_dim], each with one sum. With 128
// columns memory is read in order: pieces of 32 take twice the time if states come from memory.
#ifdef __AVX512F__
constexpr int COLUMN_VECTORS = 8;
#else
constexpr int COLUMN_VECTORS = 4;
#endif

struct Delta {
  int32_t num_heads, num_key_heads, key_dim, value_dim, width;
  float eps;
  const float* conv;     // [width, channels]
  const float* rates;    // [num_heads]: exp(A_log)
  const float* dt_bias;  // [num_heads]
  const float* norm;     // [value_dim]

  int group() const { return num_heads / num_key_heads; }
  int num_keys() const { return num_key_heads * key_dim; }
  int channels() const { return 2 * num_keys() + num_heads * value_dim; }
  size_t matrix() const { return (size_t)key_dim * value_dim; }
};

// The part of one layer in the states and kept drafts.
struct LayerStates {
  float* matrices;  // [states, num_heads, key_dim, value_dim]
  float* columns;   // [states, width, channels]
  float* kept;      // [states, most_drafts, channels + 2 · num_heads]
  int32_t most_drafts;
};

struct StateRows {
  int32_t num_rows, interval;
  const int64_t* starts;  // [num_rows + 1], first token of each row in the step
  const int64_t *num_drafts, *states, *positions, *num_kept, *num_seen, *copies;  // [num_rows]
};

// log(1 + e^x). The division repairs the rounding of 1 + e^−|x|.
INLINE f32x16 softplus(f32x16 x) {
  f32x16 u = exp(min(x, sub(zero(), x))), w = add(spread(1), u);
  f32x16 added = sub(w, spread(1));
  f32x16 small = div(mul(log(w), u), max(added, spread(1e-10f)));
  return add(max(x, zero()), pick(added, spread(1e-10f), small, u));
}

// S ← decay · S, S ← S + key ⊗ beta · (value − Sᵀ key), y = Sᵀ query for VECTORS · 16 columns of S
// [key_dim, value_dim].
template <int VECTORS>
INLINE void advance_columns(float* matrix, int key_dim, int value_dim, const float* query,
                            const float* key, const float* value, f32x16 decay, f32x16 beta,
                            float* y) {
  f32x16 sums[VECTORS], errors[VECTORS];
  for (f32x16& each : sums) each = zero();
  for (int i = 0; i < key_dim; i++)
    for (int v = 0; v < VECTORS; v++) {
      f32x16 old = load(matrix + (size_t)i * value_dim + v * LANES);
      sums[v] = fma(old, spread(key[i]), sums[v]);
    }
  for (int v = 0; v < VECTORS; v++) {
    errors[v] = mul(beta, sub(load(value + v * LANES), mul(decay, sums[v])));
    sums[v] = zero();
  }
  for (int i = 0; i < key_dim; i++)
    for (int v = 0; v < VECTORS; v++) {
      float* place = matrix + (size_t)i * value_dim + v * LANES;
      f32x16 now = fma(spread(key[i]), errors[v], mul(decay, load(place)));
      store(place, now);
      sums[v] = fma(now, spread(query[i]), sums[v]);
    }
  for (int v = 0; v < VECTORS; v++) store(y + v * LANES, sums[v]);
}

// The same for all columns.
INLINE void advance(float* matrix, int key_dim, int value_dim, const float* query, const float* key,
                    const float* value, float decay, float beta, float* y) {
  f32x16 decays = spread(decay), betas = spread(beta);
  int c = 0;
  for (; c + COLUMN_VECTORS * LANES <= value_dim; c += COLUMN_VECTORS * LANES)
    advance_columns<COLUMN_VECTORS>(matrix + c, key_dim, value_dim, query, key, value + c, decays,
                                    betas, y + c);
  for (; c < value_dim; c += LANES)
    advance_columns<1>(matrix + c, key_dim, value_dim, query, key, value + c, decays, betas, y + c);
}

inline thread_local Scratch<float> draft_matrices;

// x [T, channels + num_heads · value_dim], gates [T, 2 · num_heads] → out [T, num_heads ·
// value_dim].
template <class T>
struct DeltaRows {
  const Delta& delta;
  const LayerStates& layer;
  const StateRows& rows;
  const float *x, *gates;
  T* out;

  void run() { share(*this, rows.num_rows * delta.num_key_heads); }

  void operator()(int item) {
    int row = item / delta.num_key_heads;
    Item{*this, row, item % delta.num_key_heads}.run();
  }

  struct Item {
    const DeltaRows& of;
    const Delta& delta;
    int key_head, first_head;
    int64_t state, copy;
    // Inputs are accepted drafts, then tokens from `first` on; from number `end` on they are
    // drafts. The state has seen the first num_seen ones.
    int first, num_kept, num, end, num_seen;
    int64_t to_copy;  // inputs before the copy

    Item(const DeltaRows& of, int row, int key_head)
        : of(of), delta(of.delta), key_head(key_head), first_head(key_head * delta.group()) {
      const StateRows& rows = of.rows;
      state = rows.states[row], copy = rows.copies[row];
      first = rows.starts[row], num_kept = rows.num_kept[row], num_seen = rows.num_seen[row];
      num = num_kept + rows.starts[row + 1] - first, end = num - rows.num_drafts[row];
      int64_t position = rows.positions[row] - num_seen;
      to_copy = (position + end) / rows.interval * rows.interval - position;
    }

    void run() {
      size_t size = delta.group() * delta.matrix();
      float* matrices = matrices_of(state);
      for (int n = 0; n < num; n++) {
        if (n == end) {
          float* drafted = draft_matrices.of(size);
          memcpy(drafted, matrices, size * sizeof(float));
          matrices = drafted;
        }
        token(n, matrices);
        if (copy >= 0 && n >= num_seen && n + 1 == to_copy) {
          memcpy(matrices_of(copy), matrices, size * sizeof(float));
          write_columns(copy, n + 1);
        }
      }
      write_columns(state, end);
      keep_drafts();
    }

    void token(int n, float* matrices) {
      alignas(64) float query[MAX_KEY_DIM], key[MAX_KEY_DIM], value[MAX_VALUE_DIM];
      alignas(64) float y[MAX_VALUE_DIM], decays[LANES], betas[LANES];
      int key_dim = delta.key_dim, value_dim = delta.value_dim, num_keys = delta.num_keys();
      const float* seen[MAX_WIDTH];
      for (int j = 0; j < delta.width; j++) seen[j] = channels_of(n - (delta.width - 1 - j));
      mix(seen, key_head * key_dim, key_dim, query);
      mix(seen, num_keys + key_head * key_dim, key_dim, key);
      normalise(query, 1.0f / __builtin_sqrtf(key_dim));
      normalise(key, 1.0f);
      open(n, decays, betas);
      for (int h = 0; h < delta.group(); h++) {
        int head = first_head + h;
        mix(seen, 2 * num_keys + head * value_dim, value_dim, value);
        advance(matrices + h * delta.matrix(), key_dim, value_dim, query, key, value, decays[h],
                betas[h], y);
        if (n >= num_kept) write_output(first + n - num_kept, head, y);
      }
    }

    // Channels of an input; before the first one come the columns of the state.
    const float* channels_of(int n) const {
      int channels = delta.channels();
      if (n < 0) return columns_of(state) + (size_t)(delta.width - num_seen + n) * channels;
      if (n < num_kept) return kept_at(n);
      return of.x + (size_t)(first + n - num_kept) * x_size();
    }

    const float* gates_of(int n) const {
      if (n < num_kept) return kept_at(n) + delta.channels();
      return of.gates + (size_t)(first + n - num_kept) * 2 * delta.num_heads;
    }

    // silu of the convolution of `num` channels
    void mix(const float* const* seen, int channel, int num, float* mixed) const {
      const float* conv = delta.conv + channel;
      int channels = delta.channels();
      for (int i = 0; i < num; i += LANES) {
        f32x16 total = zero();
        for (int j = 0; j < delta.width; j++)
          total = fma(load(conv + (size_t)j * channels + i), load(seen[j] + channel + i), total);
        store(mixed + i, silu(total));
      }
    }

    void normalise(float* head, float factor) const {
      float squares = sum_squares(head, delta.key_dim);
      f32x16 scale = spread(factor / __builtin_sqrtf(squares + EPS_OF_KEYS));
      for (int i = 0; i < delta.key_dim; i += LANES) store(head + i, mul(load(head + i), scale));
    }

    // The decays and betas of the item's value heads: 1 and 0 for an input that the state has seen.
    void open(int n, float* decays, float* betas) const {
      if (n < num_seen) {
        store(decays, spread(1));
        store(betas, zero());
        return;
      }
      const float* b = gates_of(n) + first_head;
      int group = delta.group();
      f32x16 a = load_some(b + delta.num_heads, group), opening = load_some(b, group);
      f32x16 spans = softplus(add(a, load_some(delta.dt_bias + first_head, group)));
      f32x16 rates = load_some(delta.rates + first_head, group);
      store(decays, or_nan(a, exp(sub(zero(), mul(rates, spans)))));
      store(betas, or_nan(opening, sigmoid(opening)));
    }

    void write_output(int t, int head, const float* y) const {
      int size = delta.value_dim;
      const float* z = of.x + (size_t)t * x_size() + delta.channels() + head * size;
      T* to = of.out + ((size_t)t * delta.num_heads + head) * size;
      f32x16 scale = norm_scale(sum_squares(y, size), size, delta.eps);
      for (int i = 0; i < size; i += LANES) {
        f32x16 normed = mul(mul(load(y + i), scale), load(delta.norm + i));
        store_narrow(to + i, mul(normed, silu(load(z + i))));
      }
    }

    // The columns of a state that has seen the first `seen` inputs.
    void write_columns(int64_t to, int seen) const {
      for (int j = 0; j < delta.width; j++)
        move_channels(channels_of(seen - delta.width + j),
                      columns_of(to) + (size_t)j * delta.channels());
    }

    void keep_drafts() const {
      for (int n = end; n < num; n++) {
        float* to = kept_at(n - end);
        move_channels(channels_of(n), to);
        const float* gates = gates_of(n) + first_head;
        to += delta.channels() + first_head;
        move(gates, delta.group(), to);
        move(gates + delta.num_heads, delta.group(), to + delta.num_heads);
      }
    }

    void move_channels(const float* from, float* to) const {
      int query = key_head * delta.key_dim, key = delta.num_keys() + query;
      int value = 2 * delta.num_keys() + first_head * delta.value_dim;
      move(from + query, delta.key_dim, to + query);
      move(from + key, delta.key_dim, to + key);
      move(from + value, delta.group() * delta.value_dim, to + value);
    }

    static void move(const float* from, int num, float* to) {
      memmove(to, from, num * sizeof(float));
    }

    float* matrices_of(int64_t number) const {
      return of.layer.matrices + (number * delta.num_heads + first_head) * delta.matrix();
    }
    float* columns_of(int64_t number) const {
      return of.layer.columns + number * delta.width * delta.channels();
    }
    float* kept_at(int n) const {
      int size = delta.channels() + 2 * delta.num_heads;
      return of.layer.kept + (state * of.layer.most_drafts + n) * size;
    }
    int x_size() const { return delta.channels() + delta.num_heads * delta.value_dim; }
  };
};
