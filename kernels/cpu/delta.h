// The gated delta rule, Mamba-2's scan, Kimi's rule and lightning attention, over the states of
// sequences: see kernels/delta/__init__.py for the formulas.
//
// An item is a row and a block of value heads with one key head. It runs over the tokens of the row
// in order, so that its sums depend neither on the cut of a prompt nor on other rows. The items of
// a row share states, columns and kept drafts: each writes its own matrices only. Columns and
// drafts are written after all items have read them.
#pragma once

#include "heads.h"
#include "words.h"

constexpr int MAX_KEY_DIM = 256, MAX_VALUE_DIM = 256, MAX_WIDTH = 8;  // as in delta.py
constexpr int BLOCK_HEADS = 8, NOTED_CHANNELS = 1024;                 // of an item
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
  int32_t is_by_channel;   // Kimi's rule: each channel of a key has its own decay
  int32_t num_norms;       // parts of a scan's or of lightning attention's output
  int32_t num_rotated;     // elements of queries and keys in lightning attention, else 0
  float eps, least, most;  // limits of the steps of a scan
  const float* conv;       // [width, channels]
  const float* rates;      // [num_heads]: exp(A_log)
  const float* dt_bias;    // [num_heads], or by channel [num_heads · key_dim]
  const float* norm;       // [value_dim], or with num_norms [num_heads · value_dim]
  const float* skip;       // [num_heads] of a scan, or null
  const float* bias;       // [channels] of a scan's convolution, or null
  const float* norms;      // [2, key_dim] of queries and keys, or null
  const float *cos, *sin;  // [positions, num_rotated], or null

  bool is_lightning() const { return norms; }
  bool scans() const { return skip || norms; }  // there is no correction
  int num_gates() const {
    if (is_lightning()) return 0;
    return num_heads * (scans() ? 1 : is_by_channel ? 1 + key_dim : 2);
  }
  int group() const { return num_heads / num_key_heads; }
  int num_blocks() const { return div_up(group(), BLOCK_HEADS); }  // of a key head
  int num_keys() const { return num_key_heads * key_dim; }
  int channels() const { return 2 * num_keys() + num_heads * value_dim; }
  size_t matrix() const { return (size_t)key_dim * value_dim; }
};

// The part of one layer in the states and kept drafts.
struct LayerStates {
  float* matrices;  // [states, num_heads, key_dim, value_dim]
  float* columns;   // [states, width, channels]
  float* kept;      // [states, most_drafts, channels + num_gates]
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

enum Rule { GATED_RULE, SCAN, BY_CHANNEL };

// S ← decay · S, S ← S + key ⊗ beta · (value − Sᵀ key), y = Sᵀ query for VECTORS · 16 columns of S
// [key_dim, value_dim]. A scan leaves out Sᵀ key. There is one decay, or one of each channel.
template <Rule RULE, int VECTORS>
INLINE void advance_columns(float* matrix, int key_dim, int value_dim, const float* query,
                            const float* key, const float* value, const float* decays, f32x16 beta,
                            float* y) {
  f32x16 sums[VECTORS], errors[VECTORS], decay = spread(*decays);
  for (f32x16& each : sums) each = zero();
  for (int i = 0; i < key_dim && RULE != SCAN; i++) {
    f32x16 factor = spread(RULE == BY_CHANNEL ? decays[i] * key[i] : key[i]);
    for (int v = 0; v < VECTORS; v++)
      sums[v] = fma(load(matrix + (size_t)i * value_dim + v * LANES), factor, sums[v]);
  }
  for (int v = 0; v < VECTORS; v++) {
    f32x16 given = load(value + v * LANES);
    f32x16 known = RULE == GATED_RULE ? mul(decay, sums[v]) : sums[v];
    errors[v] = mul(beta, RULE == SCAN ? given : sub(given, known));
    sums[v] = zero();
  }
  for (int i = 0; i < key_dim; i++) {
    if (RULE == BY_CHANNEL) decay = spread(decays[i]);
    for (int v = 0; v < VECTORS; v++) {
      float* place = matrix + (size_t)i * value_dim + v * LANES;
      f32x16 now = fma(spread(key[i]), errors[v], mul(decay, load(place)));
      store(place, now);
      sums[v] = fma(now, spread(query[i]), sums[v]);
    }
  }
  for (int v = 0; v < VECTORS; v++) store(y + v * LANES, sums[v]);
}

// The same for all columns from the c-th on, as far as VECTORS · 16 fit. Returns the next column.
template <Rule RULE, int VECTORS>
INLINE int advance_some(int c, float* matrix, int key_dim, int value_dim, const float* query,
                        const float* key, const float* value, const float* decays, f32x16 beta,
                        float* y) {
  for (; c + VECTORS * LANES <= value_dim; c += VECTORS * LANES)
    advance_columns<RULE, VECTORS>(matrix + c, key_dim, value_dim, query, key, value + c, decays,
                                   beta, y + c);
  return c;
}

template <Rule RULE>
INLINE void advance(float* matrix, int key_dim, int value_dim, const float* query, const float* key,
                    const float* value, const float* decays, float beta, float* y) {
  f32x16 betas = spread(beta);
  int c = advance_some<RULE, COLUMN_VECTORS>(0, matrix, key_dim, value_dim, query, key, value,
                                             decays, betas, y);
  c = advance_some<RULE, 4>(c, matrix, key_dim, value_dim, query, key, value, decays, betas, y);
  advance_some<RULE, 1>(c, matrix, key_dim, value_dim, query, key, value, decays, betas, y);
}

inline thread_local Scratch<float> draft_matrices;
inline Scratch<float> scanned;  // [T, num_heads · value_dim]: outputs of a scan before their norm

// x [T, channels + num_heads · value_dim], gates [T, num_gates] → out [T, num_heads · value_dim].
template <class T>
struct DeltaRows {
  const Delta& delta;
  const LayerStates& layer;
  const StateRows& rows;
  const float *x, *gates;
  T* out;
  float* gated = nullptr;

  void run() {
    int num = rows.starts[rows.num_rows], inner = delta.num_heads * delta.value_dim;
    if (delta.scans()) gated = scanned.of((size_t)num * inner);
    share(*this, rows.num_rows * delta.num_key_heads * delta.num_blocks());
    int num_parts = div_up(delta.channels(), NOTED_CHANNELS);
    auto note = [=](int item) {
      Inputs{*this, item / num_parts}.note(item % num_parts * NOTED_CHANNELS);
    };
    share(note, rows.num_rows * num_parts);
    if (delta.scans()) norm_groups(num, inner);
  }

  void operator()(int item) {
    int num_blocks = delta.num_blocks(), num = delta.num_key_heads * num_blocks;
    int key_head = item % num / num_blocks, first = item % num_blocks * BLOCK_HEADS;
    int num_heads = delta.group() - first < BLOCK_HEADS ? delta.group() - first : BLOCK_HEADS;
    Item{{*this, item / num}, key_head, key_head * delta.group() + first, num_heads}.run();
  }

  void norm_groups(int num, int inner) {
    int size = inner / delta.num_norms, of_x = delta.channels() + inner;
    each_row(num * delta.num_norms, size, [=](size_t at) {
      const float* weight = delta.norm + at % inner;
      if (!delta.is_lightning()) return norm(gated + at, weight, size, delta.eps, out + at);
      norm(gated + at, weight, size, delta.eps, gated + at);
      const float* z = x + at / inner * of_x + delta.channels() + at % inner;
      for (int i = 0; i < size; i += LANES) {
        f32x16 gate = load(z + i), opened = or_nan(gate, sigmoid(gate));
        store_narrow(out + at + i, mul(load(gated + at + i), opened));
      }
    });
  }

  struct Inputs {
    const DeltaRows& of;
    const Delta& delta;
    int64_t state, copy;
    int64_t position;  // of the first input
    // Inputs are accepted drafts, then tokens from `first` on; from number `end` on they are
    // drafts. The state has seen the first num_seen ones.
    int first, num_kept, num, end, num_seen;
    int64_t to_copy;  // inputs before the copy

    Inputs(const DeltaRows& of, int row) : of(of), delta(of.delta) {
      const StateRows& rows = of.rows;
      state = rows.states[row], copy = rows.copies[row];
      first = rows.starts[row], num_kept = rows.num_kept[row], num_seen = rows.num_seen[row];
      num = num_kept + rows.starts[row + 1] - first, end = num - rows.num_drafts[row];
      position = rows.positions[row] - num_seen;
      to_copy = (position + end) / rows.interval * rows.interval - position;
    }

    bool copies() const { return copy >= 0 && to_copy > num_seen; }

    // Channels of an input; before the first one come the columns of the state.
    const float* channels_of(int n) const {
      int channels = delta.channels();
      if (n < 0) return columns_of(state) + (size_t)(delta.width - num_seen + n) * channels;
      if (n < num_kept) return kept_at(n);
      return of.x + (size_t)(first + n - num_kept) * x_size();
    }

    const float* gates_of(int n) const {
      if (n < num_kept) return kept_at(n) + delta.channels();
      return of.gates + (size_t)(first + n - num_kept) * delta.num_gates();
    }

    // Writes some channels, from `from` on, to the columns of the state and its copy, and keeps
    // those of drafts, and with the first channels their gates.
    void note(int from) const {
      int left = delta.channels() - from, size = left < NOTED_CHANNELS ? left : NOTED_CHANNELS;
      if (copies()) write_columns(copy, to_copy, from, size);
      write_columns(state, end, from, size);
      for (int n = end; n < num; n++) {
        float* to = kept_at(n - end);
        move(channels_of(n) + from, size, to + from);
        if (!from) move(gates_of(n), delta.num_gates(), to + delta.channels());
      }
    }

    // The columns of a state that has seen the first `seen` inputs.
    void write_columns(int64_t to, int seen, int from, int size) const {
      for (int j = 0; j < delta.width; j++)
        move(channels_of(seen - delta.width + j) + from, size,
             columns_of(to) + (size_t)j * delta.channels() + from);
    }

    static void move(const float* from, int num, float* to) {
      memmove(to, from, num * sizeof(float));
    }

    float* columns_of(int64_t number) const {
      return of.layer.columns + number * delta.width * delta.channels();
    }
    float* kept_at(int n) const {
      int size = delta.channels() + delta.num_gates();
      return of.layer.kept + (state * of.layer.most_drafts + n) * size;
    }
    int x_size() const { return delta.channels() + delta.num_heads * delta.value_dim; }
  };

  struct Item : Inputs {
    int key_head, first_head, num_heads;

    using Inputs::channels_of, Inputs::gates_of, Inputs::x_size;
    using Inputs::of, Inputs::delta, Inputs::num, Inputs::end, Inputs::num_kept, Inputs::num_seen;
    using Inputs::state, Inputs::copy, Inputs::to_copy, Inputs::first, Inputs::position;

    Item(Inputs inputs, int key_head, int first_head, int num_heads)
        : Inputs(inputs), key_head(key_head), first_head(first_head), num_heads(num_heads) {}

    void run() {
      size_t size = num_heads * delta.matrix();
      float* matrices = matrices_of(state);
      for (int n = 0; n < num; n++) {
        if (n == end) {
          float* drafted = draft_matrices.of(size);
          memcpy(drafted, matrices, size * sizeof(float));
          matrices = drafted;
        }
        token(n, matrices);
        if (this->copies() && n + 1 == to_copy)
          memcpy(matrices_of(copy), matrices, size * sizeof(float));
      }
    }

    void token(int n, float* matrices) {
      alignas(64) float query[MAX_KEY_DIM], key[MAX_KEY_DIM], value[MAX_VALUE_DIM];
      alignas(64) float y[MAX_VALUE_DIM], decays[BLOCK_HEADS * MAX_KEY_DIM], betas[LANES];
      int key_dim = delta.key_dim, value_dim = delta.value_dim, num_keys = delta.num_keys();
      const float* seen[MAX_WIDTH];
      for (int j = 0; j < delta.width; j++) seen[j] = channels_of(n - (delta.width - 1 - j));
      mix(seen, key_head * key_dim, key_dim, query);
      mix(seen, num_keys + key_head * key_dim, key_dim, key);
      if (delta.is_lightning()) {
        turn(n, query, delta.norms);
        turn(n, key, delta.norms + key_dim);
        for (int i = 0; i < key_dim; i++) query[i] *= 1.0f / __builtin_sqrtf(key_dim);
      } else if (!delta.scans()) {
        normalise(query, 1.0f / __builtin_sqrtf(key_dim));
        normalise(key, 1.0f);
      }
      open(n, decays, betas);
      for (int h = 0; h < num_heads; h++) {
        int head = first_head + h;
        float *matrix = matrices + h * delta.matrix(), *own = decays + h;
        mix(seen, 2 * num_keys + head * value_dim, value_dim, value);
        if (delta.is_by_channel) {
          open_channels(n, head, own = decays + h * key_dim);
          advance<BY_CHANNEL>(matrix, key_dim, value_dim, query, key, value, own, betas[h], y);
        } else if (delta.scans())
          advance<SCAN>(matrix, key_dim, value_dim, query, key, value, own, betas[h], y);
        else
          advance<GATED_RULE>(matrix, key_dim, value_dim, query, key, value, own, betas[h], y);
        if (n < num_kept) continue;
        if (delta.scans())
          write_scanned(first + n - num_kept, head, y, value);
        else
          write_output(first + n - num_kept, head, y);
      }
    }

    // silu of the convolution of `num` channels, or in lightning attention these as they are
    void mix(const float* const* seen, int channel, int num, float* mixed) const {
      if (delta.is_lightning()) return Inputs::move(seen[0] + channel, num, mixed);
      const float* conv = delta.conv + channel;
      int channels = delta.channels();
      for (int i = 0; i < num; i += LANES) {
        f32x16 total = delta.bias ? load(delta.bias + channel + i) : zero();
        for (int j = 0; j < delta.width; j++)
          total = fma(load(conv + (size_t)j * channels + i), load(seen[j] + channel + i), total);
        store(mixed + i, silu(total));
      }
    }

    // The norm of a query or key, and the rotation by the position of input n
    void turn(int n, float* head, const float* weight) const {
      size_t at = (position + n) * delta.num_rotated;
      norm(head, weight, delta.key_dim, delta.eps, head);
      rotate(head, delta.cos + at, delta.sin + at, delta.num_rotated, false);
    }

    void normalise(float* head, float factor) const {
      float squares = sum_squares(head, delta.key_dim);
      f32x16 scale = spread(factor / __builtin_sqrtf(squares + EPS_OF_KEYS));
      for (int i = 0; i < delta.key_dim; i += LANES) store(head + i, mul(load(head + i), scale));
    }

    // The decays of a value head's channels: 1 for an input that the state has seen.
    void open_channels(int n, int head, float* decays) const {
      int size = delta.key_dim;
      const float* gates = gates_of(n) + delta.num_heads + head * size;
      const float* bias = delta.dt_bias + head * size;
      for (int i = 0; i < size; i += LANES) {
        f32x16 a = load(gates + i), steps = softplus(add(a, load(bias + i)));
        f32x16 kept = exp(sub(zero(), mul(spread(delta.rates[head]), steps)));
        store(decays + i, n < num_seen ? spread(1) : or_nan(a, kept));
      }
    }

    // The decays of the item's value heads, and their betas or steps: 1 and 0 for an input that the
    // state has seen.
    void open(int n, float* decays, float* betas) const {
      if (n < num_seen) {
        store(decays, spread(1));
        store(betas, zero());
        return;
      }
      f32x16 rates = load_some(delta.rates + first_head, num_heads);
      if (delta.is_lightning()) {
        store(decays, exp(sub(zero(), rates)));
        store(betas, spread(1));
        return;
      }
      const float* gates = gates_of(n) + first_head;
      f32x16 opening = load_some(gates, num_heads);
      if (delta.is_by_channel) return store(betas, or_nan(opening, sigmoid(opening)));
      f32x16 a = delta.scans() ? opening : load_some(gates + delta.num_heads, num_heads);
      f32x16 steps = softplus(add(a, load_some(delta.dt_bias + first_head, num_heads)));
      if (delta.scans()) steps = min(max(steps, spread(delta.least)), spread(delta.most));
      store(decays, or_nan(a, exp(sub(zero(), mul(rates, steps)))));
      store(betas, or_nan(opening, delta.scans() ? steps : sigmoid(opening)));
    }

    // y + skip · value, times silu of the gate, or y alone
    void write_scanned(int t, int head, const float* y, const float* value) const {
      int size = delta.value_dim;
      const float* z = of.x + (size_t)t * x_size() + delta.channels() + head * size;
      float* to = of.gated + ((size_t)t * delta.num_heads + head) * size;
      if (delta.is_lightning()) return Inputs::move(y, size, to);
      for (int i = 0; i < size; i += LANES) {
        f32x16 whole = fma(spread(delta.skip[head]), load(value + i), load(y + i));
        store(to + i, mul(whole, silu(load(z + i))));
      }
    }

    void write_output(int t, int head, const float* y) const {
      int size = delta.value_dim;
      const float* z = of.x + (size_t)t * x_size() + delta.channels() + head * size;
      T* to = of.out + ((size_t)t * delta.num_heads + head) * size;
      f32x16 scale = norm_scale(sum_squares(y, size), size, delta.eps);
      for (int i = 0; i < size; i += LANES) {
        f32x16 normed = mul(mul(load(y + i), scale), load(delta.norm + i));
        f32x16 gate = load(z + i);
        gate = delta.is_by_channel ? or_nan(gate, sigmoid(gate)) : silu(gate);
        store_narrow(to + i, mul(normed, gate));
      }
    }

    float* matrices_of(int64_t number) const {
      return of.layer.matrices + (number * delta.num_heads + first_head) * delta.matrix();
    }
  };
};
