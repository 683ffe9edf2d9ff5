// A forward pass on the CPU as a list of operators, called with ctypes: see kernels/cpu/program.py
// for the arguments. Each type of weights is compiled in a file of its own, at the same time.
#pragma once

#include "adapt.h"
#include "attention.h"
#include "columns.h"
#include "decode.h"
#include "delta.h"
#include "experts.h"
#include "index.h"
#include "latent.h"
#include "ranks.h"
#include "short_conv.h"

struct Heads {
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t rotary_dim;  // elements of a head that are rotated, from the first on
  int32_t is_interleaved;
  int32_t norms_tokens;  // norms extend over all heads of a token, on all ranks
  int32_t window;        // see Attention, also for softcap and sinks
  int32_t is_causal;     // tokens of images see no later key either
  float eps, scale, softcap;
  const float *query_norm, *key_norm;  // or null
  const float *cos, *sin;              // [positions, rotary_dim]
  const float* sinks;                  // [num_heads] or null
};

// Latent attention: buffers, sizes, weights.
struct Latents {
  int32_t latent, queries, attended;  // buffers; `in`: queries before projection
  int32_t num_heads, rank, nope_dim, rope_dim, value_dim;
  int32_t is_interleaved;
  int32_t topk;  // a token attends to this number of chosen keys, or to all if it is 0
  float eps, scale;
  const float* norm;       // [rank]
  const float *cos, *sin;  // [positions, rope_dim]
  Matrix keys, values;     // [num_heads · rank, nope_dim] and [num_heads · value_dim, rank]
};

enum Kind : int32_t {
  EMBED,
  SCALE,
  NORM,
  NARROW,
  LINEAR,
  GATED,
  ATTEND,
  ORDER,
  EXPERTS,
  OPEN,
  LATENT,
  BEND,
  SUM,
  SHORT_CONV,
  GATED_DELTA,
  GATE,
  ADAPT,
  ADD,
  INDEX,
  JOIN,
  ACTIVATE,
  ADAPT_EMBEDDINGS,
  LAYER_NORM,
  GELU
};

// `in` and `out` are buffers: wide ones are float32, the others of the weights' type T.
struct Operator {
  int32_t kind;
  int32_t in, out;
  int32_t second;      // ATTEND: a buffer for queries; EXPERTS, OPEN: input of the router or gate;
                       // GATED_DELTA: the gates; GATED with `adapt`: deltas; LATENT: chosen keys;
                       // JOIN: the last part; ACTIVATE: factors of the gates
  int32_t layer;       // ATTEND, LATENT, INDEX: index of the cache; GATED_DELTA: of the states
  int32_t group;       // ATTEND, LATENT, SHORT_CONV, INDEX: index of the layer's group
  int32_t size;        // of a row of `in`; EMBED: of `out`; NORM: of a part of a row
  int32_t is_wide;     // NORM, LAYER_NORM: `out` is wide
  int32_t adds;        // NORM, LINEAR, EXPERTS, SUM, ADAPT: adds to `out`
  int32_t first, num;  // EMBED: first local id, number of local ids; JOIN: num of `second`;
                       // EXPERTS: a buffer of marks, and 0 for all tokens, 1 for those without a
                       // mark, 2 for those with one; NORM: num of a row's parts, or 0; ATTEND: 1 if
                       // values are normed; ACTIVATE: first element in a row of `second`, size of
                       // that row; GELU: 1 if it has gates
  float scale;         // SCALE, BEND, EXPERTS, ADAPT; LINEAR and SUM if they add
  float eps;           // NORM, LAYER_NORM
  float alpha, beta;   // GATED, ACTIVATE
  const float* norm;
  Matrix weight;       // LINEAR, GATED, GELU, OPEN; EMBED: columns are embeddings if `rows` is null
  const void* rows;    // EMBED: [num, size]; SUM, LAYER_NORM: float32 bias [size]; or null
  const Heads* heads;  // ATTEND
  const int64_t* order;         // ORDER: [size]
  const Experts* experts;       // EXPERTS
  const Latents* latents;       // LATENT
  const ShortConv* short_conv;  // SHORT_CONV
  const Delta* delta;           // GATED_DELTA
  const Adapt* adapt;           // ADAPT, ADAPT_EMBEDDINGS; GATED with a buffer for deltas; EXPERTS
  const Index* index;           // INDEX
};

// The blocks of a step in one group of layers; other groups differ in tables and slot mapping only.
struct Group {
  const int64_t* slot_mapping;  // [num_tokens]
  Rows rows;
};

struct Step {
  int32_t num_tokens, block_size;
  const int64_t* positions;  // [num_tokens]
  const Group* groups;
  void* const* caches;              // one per layer
  float* const* scales;             // of quantized caches, one per layer
  const BlockStrides* strides;      // one per layer
  void* const* buffers;             // [num_tokens, size] each
  int32_t cached;                   // a Cached, of the caches with heads or latents
  const LayerStates* layer_states;  // one per layer with states
  const StateRows* state_rows;
};

struct Program {
  const Operator* ops;
  int32_t num_ops;
  const Step* step;
};

inline Takers takers(const Operator& op, const Step& step) {
  const float* marks = op.num ? (const float*)step.buffers[op.first] : nullptr;
  return {marks, (size_t)op.size, op.num == 2};
}

inline Units units;
inline Sums* partials = nullptr;
inline int num_sums = 0;

inline Scratch<float> all_squares;

// Σ x² of each token's queries and of its keys, over all ranks: [num_tokens, 2]. Null if heads are
// normed one by one or are all on one rank.
inline const float* squares_of_ranks(const Heads& heads, const float* x, int num_tokens) {
  if (!heads.norms_tokens || collectives.size == 1) return nullptr;
  float* squares = all_squares.of(2 * num_tokens);
  int num_queries = heads.num_heads * heads.head_dim;
  int num_keys = heads.num_kv_heads * heads.head_dim;
  int size = num_queries + 2 * num_keys;
  each_row(num_tokens, size, [=](size_t at) {
    float* found = squares + at / size * 2;
    found[0] = sum_squares(x + at, num_queries);
    found[1] = sum_squares(x + at + num_queries, num_keys);
  });
  sum_ranks(squares, num_tokens, 2, nullptr, false, 1, squares);
  return squares;
}

// Norms and rotates the heads of every token, and writes its keys and values to the cache. Without
// values in `x`, keys before their norm are values too; without keys, the cache has both already.
template <class T, class W>
struct Prepare {
  const Heads& heads;
  const Step& step;
  const int64_t* slot_mapping;
  Cache<W> cache;
  float* x;  // [num_tokens, size]: queries, keys, values
  int size;
  bool norms_values;
  T* query;                                           // [num_tokens, num_heads, head_dim]
  const float* squares;                               // see squares_of_ranks
  int group = step.num_tokens < 256 ? 4 : 2 * LANES;  // LANES tokens share lines of keys

  void run() { share(*this, div_up(step.num_tokens, group)); }

  void operator()(int item) {
    int end = (item + 1) * group;
    for (int t = item * group; t < end && t < step.num_tokens; t++) token(t);
  }

  void token(int t) {
    int dim = heads.head_dim, num_heads = heads.num_heads, num_kv_heads = heads.num_kv_heads;
    const float* cos = heads.cos + step.positions[t] * heads.rotary_dim;
    const float* sin = heads.sin + step.positions[t] * heads.rotary_dim;
    float* head = x + (size_t)t * size;
    T* to = query + (size_t)t * num_heads * dim;
    norm_heads(head, heads.query_norm, num_heads, squares ? squares + 2 * t : nullptr);
    for (int h = 0; h < num_heads; h++, head += dim) {
      rotate(head, cos, sin, heads.rotary_dim, heads.is_interleaved);
      for (int i = 0; i < dim; i += LANES) store_narrow(to + h * dim + i, load(head + i));
    }
    if (size == num_heads * dim) return;
    const float* values = values_of(head, size - (num_heads + num_kv_heads) * dim);
    norm_heads(head, heads.key_norm, num_kv_heads, squares ? squares + 2 * t + 1 : nullptr);
    // All tokens are written before attention starts, so a next slot of the same step counts as
    // written.
    bool is_last = t + 1 == step.num_tokens || slot_mapping[t + 1] != slot_mapping[t] + 1;
    for (int h = 0; h < num_kv_heads; h++, head += dim) {
      rotate(head, cos, sin, heads.rotary_dim, heads.is_interleaved);
      cache.write(slot_mapping[t], h, head, values + h * dim, is_last);
    }
  }

  // The `num` elements of values after these keys, or copies of the keys.
  const float* values_of(const float* keys, int num) const {
    int total = heads.num_kv_heads * heads.head_dim;
    const float* given = num ? keys + total : keys;
    if (num && !norms_values) return given;
    float* made = scratch(total);
    if (!norms_values) memcpy(made, given, total * sizeof(float));
    for (int i = 0; norms_values && i < total; i += heads.head_dim)
      norm(given + i, heads.head_dim, heads.eps, made + i);
    return made;
  }

  // Ranks have equal numbers of query heads and of KV heads, and each KV head is on the same number
  // of ranks: so the mean square over all ranks equals the mean square over all heads.
  void norm_heads(float* head, const float* weight, int num, const float* of_ranks) {
    if (!weight) return;
    int total = num * heads.head_dim, size = heads.norms_tokens ? total : heads.head_dim;
    if (of_ranks) {
      f32x16 scale = norm_scale(*of_ranks, total * collectives.size, heads.eps);
      return scale_norm(head, scale, weight, total, head);
    }
    for (int i = 0; i < total; i += size) norm(head + i, weight, size, heads.eps, head + i);
  }
};

// The rows as layers with these heads see them.
inline Rows seen_rows(const Heads& heads, const Group& group) {
  Rows rows = group.rows;
  if (heads.is_causal) rows.ends = nullptr;
  return rows;
}

// Units and partial sums of attention for layers with heads of this number, window and sight.
struct Prepared {
  int num_heads = 0, num_kv_heads = 0, window = 0, is_causal = 0;

  void prepare(const Heads& heads, const Rows& rows) {
    if (heads.num_heads == num_heads && heads.num_kv_heads == num_kv_heads &&
        heads.window == window && heads.is_causal == is_causal)
      return;
    num_heads = heads.num_heads, num_kv_heads = heads.num_kv_heads, window = heads.window;
    is_causal = heads.is_causal;
    units.prepare(rows, num_heads / num_kv_heads, num_kv_heads, UNIT_ROWS, window);
    int wanted = units.num_partials() * num_heads;
    if (wanted <= num_sums) return;
    free(partials);
    partials = (Sums*)malloc(wanted * sizeof(Sums));
    num_sums = wanted;
  }
};

template <class T, class W>
void attend(const Operator& op, const Step& step, float* x, T* out) {
  const Heads& heads = *op.heads;
  Cache<W> cache = {(W*)step.caches[op.layer], step.scales[op.layer], step.strides[op.layer],
                    step.block_size,           heads.num_kv_heads,    heads.head_dim};
  T* query = (T*)step.buffers[op.second];
  const float* squares = squares_of_ranks(heads, x, step.num_tokens);
  const Group& group = step.groups[op.group];
  bool norms_values = op.num;
  Prepare<T, W>{heads, step, group.slot_mapping, cache, x, op.size, norms_values, query, squares}
      .run();
  Attention<T, W>{
      seen_rows(heads, group), cache,       units,        query,         out,        partials,
      heads.num_heads,         heads.scale, heads.window, heads.softcap, heads.sinks}
      .run();
}

template <class T>
void attend(const Operator& op, const Step& step, float* x, T* out) {
  switch (step.cached) {
    case INT8_CODES:
      return attend<T, int8_t>(op, step, x, out);
    case FP8_CODES:
      return attend<T, fp8>(op, step, x, out);
    default:
      return attend<T, T>(op, step, x, out);
  }
}

inline Units latent_units;
inline LatentSums* latent_partials = nullptr;
inline int num_latent_sums = 0;

// Prepares units of latent attention for all layers; returns the number of heads per item.
inline int prepare_latents(const Rows& rows, int num_heads, int topk) {
  int num_groups = div_up(num_heads, LATENT_ROWS), heads_at_once = div_up(num_heads, num_groups);
  latent_units.prepare(rows, heads_at_once, num_groups, topk ? heads_at_once : LATENT_ROWS, 0,
                       topk);
  int wanted = latent_units.num_partials() * num_heads;
  if (wanted > num_latent_sums) {
    free(latent_partials);
    latent_partials = (LatentSums*)malloc((size_t)wanted * sizeof(LatentSums));
    num_latent_sums = wanted;
  }
  return heads_at_once;
}

template <class T>
void attend_latents(const Latents& of, const Operator& op, const Step& step) {
  LatentShape shape = {of.num_heads, of.rank,      of.nope_dim,
                       of.rope_dim,  of.value_dim, (bool)of.is_interleaved};
  Rotation rotation = {step.positions, of.cos, of.sin, of.rope_dim, shape.is_interleaved};
  const Group& group = step.groups[op.group];
  int num = step.num_tokens;
  LatentCache<T> cache = {(uint8_t*)step.caches[op.layer], step.scales[op.layer],
                          (Cached)step.cached, of.rank, of.rope_dim};
  T *queries = (T*)step.buffers[of.queries], *attended = (T*)step.buffers[of.attended];
  write_latents(shape, rotation, (const float*)step.buffers[of.latent], of.norm, of.eps, num,
                group.slot_mapping, cache);
  const float* made = (const float*)step.buffers[op.in];
  LatentQueries<T>{shape, rotation, made, num, packed<T>(of.keys), queries}.run();
  int heads_at_once = prepare_latents(group.rows, of.num_heads, of.topk);
  const int32_t* chosen = of.topk ? (const int32_t*)step.buffers[op.second] : nullptr;
  LatentAttention<T>{group.rows,        cache,           step.block_size, latent_units,  queries,
                     attended,          latent_partials, of.num_heads,    heads_at_once, of.rank,
                     shape.entry_dim(), of.scale,        chosen,          of.topk}
      .run();
  LatentValues<T>{shape, attended, num, packed<T>(of.values), (T*)step.buffers[op.out]}.run();
}

template <class T>
void run_index(const Index& index, const Operator& op, const Step& step) {
  const Group& group = step.groups[op.group];
  Indexing<T>{index,
              group.rows,
              step.positions,
              group.slot_mapping,
              step.num_tokens,
              step.block_size,
              (T*)step.caches[op.layer],
              (const float*)step.buffers[op.in],
              (const float*)step.buffers[index.key],
              (const float*)step.buffers[index.weights],
              (T*)step.buffers[index.turned],
              (int32_t*)step.buffers[op.out]}
      .run();
}

// w [n, k] → tiles, with DEPTH adjacent elements of each column; column c of the packed matrix is
// row `order[c]` of w.
template <class W, int DEPTH>
void pack(const W* w, const int64_t* order, int n, int k, W* tiles) {
  auto tile = [=](int index) {
    W* to = tiles + index * Packed<W>::tile_size(k);
    memset(to, 0, Packed<W>::tile_size(k) * sizeof(W));
    for (int lane = 0; lane < LANES; lane++) {
      int column = index * LANES + lane;
      if (column == n) break;
      const W* row = w + order[column] * k;
      for (int i = 0; i < k; i++) to[(i / DEPTH * LANES + lane) * DEPTH + i % DEPTH] = row[i];
    }
  };
  share(tile, div_up(n, LANES));
}

// Quantized values [n, k / 2], the even one of two in the lower half of a byte → tiles.
inline void pack_nibbles(const uint8_t* codes, const int64_t* order, int n, int k, uint8_t* tiles) {
  size_t tile_bytes = Packed<Grouped<nibble>>::tile_bytes(k);
  auto tile = [=](int index) {
    uint8_t* to = tiles + index * tile_bytes;
    memset(to, 0, tile_bytes);
    for (int lane = 0; lane < LANES; lane++) {
      int column = index * LANES + lane;
      if (column == n) break;
      const uint8_t* row = codes + order[column] * (k / 2);
      for (int i = 0; i < k; i++) {
        int code = row[i / 2] >> (i % 2 * 4) & 15, bit = code_shift(i % CODES_DEPTH);
        to[i / CODES_DEPTH * CODES_BYTES + lane * 4 + bit / 8] |= code << bit % 8;
      }
    }
  };
  share(tile, div_up(n, LANES));
}

// Embeddings of `ids` → x [num, size]; zeros for ids of other ranks.
template <class T>
void embed(const Operator& op, const int32_t* ids, int num, float* x) {
  const int size = op.size;
  each_row(num, size, [=, &op](size_t at) {
    int id = ids[at / size] - op.first;
    if (id < 0 || id >= op.num) {
      memset(x + at, 0, size * sizeof(float));
    } else if (op.rows) {
      const T* row = (const T*)op.rows + (size_t)id * size;
      for (int i = 0; i < size; i++) x[at + i] = widen(row[i]);
    } else {
      with_packed<T>(op.weight, [=](const auto& w) { unpack_column<T>(w, id, x + at); });
    }
  });
}

template <class T>
void run_norm(const Operator& op, const float* x, int num_tokens, void* out) {
  int num = num_tokens * (op.num ? op.num : 1);
  if (op.adds)
    add_norm_rows(x, op.norm, num, op.size, op.eps, (float*)out);
  else if (op.is_wide)
    norm_rows(x, op.norm, num, op.size, op.eps, (float*)out);
  else
    norm_rows(x, op.norm, num, op.size, op.eps, (T*)out);
}

template <class T>
void run_layer_norm(const Operator& op, const float* x, int num_tokens, void* out) {
  const float* bias = (const float*)op.rows;
  if (op.is_wide)
    layer_norm_rows(x, op.norm, bias, num_tokens, op.size, op.eps, (float*)out);
  else
    layer_norm_rows(x, op.norm, bias, num_tokens, op.size, op.eps, (T*)out);
}

// out[r][i] = x[r][order[i]]
template <class T>
void order_rows(const T* x, const int64_t* order, int num, int size, T* out) {
  each_row(num, size, [=](size_t at) {
    for (int i = 0; i < size; i++) out[at + i] = x[at + order[i]];
  });
}

// out[r] = x[r], y[r]
inline void join_rows(const float* x, int size, const float* y, int more, int num, float* out) {
  each_row(num, 1, [=](size_t row) {
    float* to = out + row * (size + more);
    memcpy(to, x + row * size, size * sizeof(float));
    memcpy(to + size, y + row * more, more * sizeof(float));
  });
}

// out += sigmoid(x · gate) · y
inline void open_rows(const float* x, const Matrix& gate, const float* y, int num, int size,
                      float* out) {
  float* openings = pair_floats.of(padded(num));
  product(x, num, packed<float>(gate), openings);
  sigmoid(openings, num, openings);
  each_row(num, size, [=](size_t at) {
    f32x16 opening = spread(openings[at / size]);
    for (int i = 0; i < size; i += LANES)
      store(out + at + i, fma(opening, load(y + at + i), load(out + at + i)));
  });
}

// The deltas of gates and ups, unless no row of the step has an adapter.
inline Deltas deltas_of(const Operator& op, const Step& step) {
  if (!op.adapt || !op.adapt->rows->num_segments) return {};
  return {(const float*)step.buffers[op.second], op.adapt->rows->is_adapted};
}

template <class T>
void run(const Operator* ops, int num_ops, const Step& step) {
  Prepared prepared;
  int num = step.num_tokens;
  for (int i = 0; i < num_ops; i++) {
    const Operator& op = ops[i];
    void *in = step.buffers[op.in], *out = step.buffers[op.out];
    switch (op.kind) {
      case EMBED:
        embed<T>(op, (const int32_t*)in, num, (float*)out);
        break;
      case SCALE:
        scale_rows((float*)out, num, op.size, op.scale);
        break;
      case ADD:
        add_rows((const float*)in, num, op.size, (float*)out);
        break;
      case BEND:
        bend_rows((float*)out, num, op.size, op.scale);
        break;
      case JOIN:
        join_rows((const float*)in, op.size, (const float*)step.buffers[op.second], op.num, num,
                  (float*)out);
        break;
      case NORM:
        run_norm<T>(op, (const float*)in, num, out);
        break;
      case LAYER_NORM:
        run_layer_norm<T>(op, (const float*)in, num, out);
        break;
      case GELU:
        with_packed<T>(op.weight,
                       [&](auto w) { gelu_product((const T*)in, num, w, (bool)op.num, (T*)out); });
        break;
      case NARROW:
        narrow_rows((const float*)in, num, op.size, (T*)out);
        break;
      case LINEAR:
        with_packed<T>(op.weight, [&](auto w) {
          if (op.adds)
            add_product((const T*)in, num, w, op.scale, (float*)out);
          else
            product((const T*)in, num, w, (float*)out);
        });
        break;
      case GATED:
        with_packed<T>(op.weight, [&](auto w) {
          gated_product((const T*)in, num, w, op.alpha, op.beta, deltas_of(op, step), (T*)out);
        });
        break;
      case ATTEND:
        prepared.prepare(*op.heads, seen_rows(*op.heads, step.groups[op.group]));
        attend<T>(op, step, (float*)in, (T*)out);
        break;
      case ORDER:
        order_rows((const T*)in, op.order, num, op.size, (T*)out);
        break;
      case LATENT:
        attend_latents<T>(*op.latents, op, step);
        break;
      case INDEX:
        run_index<T>(*op.index, op, step);
        break;
      case EXPERTS:
        if (!op.adds) memset(out, 0, (size_t)num * op.size * sizeof(float));
        run_experts(*op.experts, takers(op, step), op.adapt, (const T*)in,
                    (const float*)step.buffers[op.second], num, op.scale, (float*)out);
        break;
      case OPEN:
        open_rows((const float*)step.buffers[op.second], op.weight, (const float*)in, num, op.size,
                  (float*)out);
        break;
      case SHORT_CONV: {
        const Group& group = step.groups[op.group];
        ColumnCache<T> cache = {step.caches + op.layer, step.strides + op.layer, step.block_size,
                                op.short_conv->part};
        run_short_conv<T>(*op.short_conv, cache, group.rows, group.slot_mapping, (const float*)in,
                          num, op.size, (T*)out);
        break;
      }
      case GATED_DELTA:
        DeltaRows<T>{*op.delta,        step.layer_states[op.layer],           *step.state_rows,
                     (const float*)in, (const float*)step.buffers[op.second], (T*)out}
            .run();
        break;
      case ACTIVATE:
        activate_rows((const float*)in, num, op.size, op.alpha, op.beta,
                      (const float*)step.buffers[op.second] + op.first, op.num, (T*)out);
        break;
      case GATE:
        gate_rows((const float*)in, num, op.size, (T*)out);
        break;
      case ADAPT:
        if (op.adapt->rows->num_segments)
          adapt_rows(*op.adapt, (const T*)in, op.size, op.scale, op.adds, (float*)out);
        break;
      case ADAPT_EMBEDDINGS:
        if (op.adapt->rows->num_segments)
          adapt_embeddings<T>(*op.adapt, (const int32_t*)in, (float*)out);
        break;
      case SUM:
        sum_ranks((const float*)in, num, op.size, (const float*)op.rows, op.adds, op.scale,
                  (float*)out);
        break;
    }
  }
}

// The exported functions for weights of type T.
#define EXPORT_PROGRAM(name, T)                                                               \
  EXPORT void shoal_pack_##name(const T* w, const int64_t* order, int n, int k, T* tiles) {   \
    pack<T, DEPTH<T>>(w, order, n, k, tiles);                                                 \
  }                                                                                           \
  EXPORT int shoal_run_##name(const Operator* ops, int num_ops, const Step* step) {           \
    run<T>(ops, num_ops, *step);                                                              \
    return collectives.failure;                                                               \
  }                                                                                           \
  EXPORT int shoal_decode_##name(const Program* trunk, const Program* head, DecodeRows* rows, \
                                 int num_steps, int64_t* tokens) {                            \
    return decode(*rows, num_steps, tokens, [=]() {                                           \
      run<T>(trunk->ops, trunk->num_ops, *trunk->step);                                       \
      run<T>(head->ops, head->num_ops, *head->step);                                          \
    });                                                                                       \
  }
