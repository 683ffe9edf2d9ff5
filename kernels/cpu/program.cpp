// A forward pass on the CPU as a list of operators, for ctypes: see kernels/cpu/program.py for what
// is passed.

#include "attention.h"
#include "experts.h"

namespace {

struct Heads {
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t rotary_dim;  // so many numbers of a head are rotated, from the first on
  int32_t is_interleaved;
  int32_t norms_tokens;  // the norms are of all heads of a token together, not of each
  int32_t window;        // a token sees so many of the last keys; 0: all of them
  float eps, scale;
  const float *query_norm, *key_norm;  // or null
  const float *cos, *sin;              // [positions, rotary_dim]
};

enum Cached : int32_t { NUMBERS, INT8_CODES, FP8_CODES };

enum Kind : int32_t { EMBED, SCALE, NORM, NARROW, LINEAR, GATED, ATTEND, ORDER, EXPERTS, OPEN };

// `in` and `out` are buffers. Wide ones are float32, the others of the weights' type T.
struct Operator {
  int32_t kind;
  int32_t in, out;
  int32_t second;   // ATTEND: a buffer for queries; EXPERTS, OPEN: what scores are made of
  int32_t layer;    // ATTEND: its cache
  int32_t size;     // of a row of `in`; EMBED: of `out`
  int32_t is_wide;  // NORM: `out` is
  int32_t adds;     // NORM, LINEAR: to what is in `out`
  float scale;      // SCALE, EXPERTS, LINEAR that adds
  float eps;        // NORM
  const float* norm;
  Matrix weight;     // LINEAR, GATED, OPEN; EMBED: its columns are the embeddings, or those are in
  const void* rows;  // EMBED: [vocab, size]
  const Heads* heads;      // ATTEND
  const int64_t* order;    // ORDER: [size]
  const Experts* experts;  // EXPERTS
};

struct Step {
  int32_t num_tokens, block_size;
  const int64_t *positions, *slot_mapping;  // [num_tokens]
  Rows rows;
  void* const* caches;   // one for each layer
  float* const* scales;  // of the codes in each
  void* const* buffers;  // [num_tokens, size] each
  int32_t cached;        // what caches hold: a Cached
};

Units units;
Sums* partials = nullptr;
int num_sums = 0;

// Norms and rotates the heads of every token, and writes its keys and values.
template <class T, class W>
struct Prepare {
  const Heads& heads;
  const Step& step;
  Cache<W> cache;
  float* x;  // [num_tokens, num_heads + 2 · num_kv_heads, head_dim]
  T* query;  // [num_tokens, num_heads, head_dim]
  static constexpr int GROUP = 4;

  void run() { share(*this, div_up(step.num_tokens, GROUP)); }

  void operator()(int item) {
    int end = (item + 1) * GROUP;
    for (int t = item * GROUP; t < end && t < step.num_tokens; t++) token(t);
  }

  void token(int t) {
    int dim = heads.head_dim, num_heads = heads.num_heads, num_kv_heads = heads.num_kv_heads;
    const float* cos = heads.cos + step.positions[t] * heads.rotary_dim;
    const float* sin = heads.sin + step.positions[t] * heads.rotary_dim;
    float* head = x + (size_t)t * (num_heads + 2 * num_kv_heads) * dim;
    T* to = query + (size_t)t * num_heads * dim;
    norm_heads(head, heads.query_norm, num_heads);
    norm_heads(head + num_heads * dim, heads.key_norm, num_kv_heads);
    for (int h = 0; h < num_heads + num_kv_heads; h++, head += dim) {
      rotate(head, cos, sin, heads.rotary_dim, heads.is_interleaved);
      if (h < num_heads)
        for (int i = 0; i < dim; i += LANES) store_narrow(to + h * dim + i, load(head + i));
    }
    // All are written before any is attended to, so what follows in a block is there or comes
    // later.
    bool is_last = t + 1 == step.num_tokens || step.slot_mapping[t + 1] != step.slot_mapping[t] + 1;
    for (int h = 0; h < num_kv_heads; h++, head += dim)
      cache.write(step.slot_mapping[t], h, head - num_kv_heads * dim, head, is_last);
  }

  void norm_heads(float* head, const float* weight, int num) {
    if (!weight) return;
    int size = heads.norms_tokens ? num * heads.head_dim : heads.head_dim;
    for (int i = 0; i < num * heads.head_dim; i += size)
      norm(head + i, weight, size, heads.eps, head + i);
  }
};

// What attention needs for all layers with so many heads.
struct Prepared {
  int num_heads = 0, num_kv_heads = 0;

  void prepare(const Heads& heads, const Rows& rows) {
    if (heads.num_heads == num_heads && heads.num_kv_heads == num_kv_heads) return;
    num_heads = heads.num_heads, num_kv_heads = heads.num_kv_heads;
    units.prepare(rows, num_heads / num_kv_heads, num_kv_heads);
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
  Cache<W> cache = {(W*)step.caches[op.layer], step.scales[op.layer], step.block_size,
                    heads.num_kv_heads, heads.head_dim};
  T* query = (T*)step.buffers[op.second];
  Prepare<T, W>{heads, step, cache, x, query}.run();
  Attention<T, W>{step.rows, cache,           units,       query,       out,
                  partials,  heads.num_heads, heads.scale, heads.window}
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

// w [n, k] → tiles, where DEPTH numbers of a column are neighbours; column c of the packed matrix
// is row `order[c]` of w.
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

// codes [n, k / 2], the even one of two in the lower half of a byte → tiles.
void pack_nibbles(const uint8_t* codes, const int64_t* order, int n, int k, uint8_t* tiles) {
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

// The embeddings of `ids` as rows of x [num, size].
template <class T>
void embed(const Operator& op, const int32_t* ids, int num, float* x) {
  Packed<T> w = packed<T>(op.weight);
  for (int r = 0; r < num; r++, x += op.size) {
    if (op.rows) {
      const T* row = (const T*)op.rows + (size_t)ids[r] * op.size;
      for (int i = 0; i < op.size; i++) x[i] = widen(row[i]);
    } else {
      const T* tile = w.tile(ids[r] / LANES) + ids[r] % LANES * DEPTH<T>;
      for (int i = 0; i < op.size; i++)
        x[i] = widen(tile[i / DEPTH<T> * LANES * DEPTH<T> + i % DEPTH<T>]);
    }
  }
}

template <class T>
void run_norm(const Operator& op, const float* x, int num, void* out) {
  if (op.adds)
    add_norm_rows(x, op.norm, num, op.size, op.eps, (float*)out);
  else if (op.is_wide)
    norm_rows(x, op.norm, num, op.size, op.eps, (float*)out);
  else
    norm_rows(x, op.norm, num, op.size, op.eps, (T*)out);
}

// out[r][i] = x[r][order[i]]
template <class T>
void order_rows(const T* x, const int64_t* order, int num, int size, T* out) {
  each_row(num, size, [=](size_t at) {
    for (int i = 0; i < size; i++) out[at + i] = x[at + order[i]];
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
      case NORM:
        run_norm<T>(op, (const float*)in, num, out);
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
        with_packed<T>(op.weight, [&](auto w) { gated_product((const T*)in, num, w, (T*)out); });
        break;
      case ATTEND:
        prepared.prepare(*op.heads, step.rows);
        attend<T>(op, step, (float*)in, (T*)out);
        break;
      case ORDER:
        order_rows((const T*)in, op.order, num, op.size, (T*)out);
        break;
      case EXPERTS:
        run_experts(*op.experts, (const T*)in, (const float*)step.buffers[op.second], num, op.scale,
                    (float*)out);
        break;
      case OPEN:
        open_rows((const float*)step.buffers[op.second], op.weight, (const float*)in, num, op.size,
                  (float*)out);
        break;
    }
  }
}

}  // namespace

#define EACH_TYPE(name, T)                                                                  \
  EXPORT void shoal_pack_##name(const T* w, const int64_t* order, int n, int k, T* tiles) { \
    pack<T, DEPTH<T>>(w, order, n, k, tiles);                                               \
  }                                                                                         \
  EXPORT void shoal_run_##name(const Operator* ops, int num_ops, const Step* step) {        \
    run<T>(ops, num_ops, *step);                                                            \
  }

EACH_TYPE(bfloat16, bf16)
EACH_TYPE(float32, float)

EXPORT void shoal_pack_int8(const int8_t* codes, const int64_t* order, int n, int k,
                            int8_t* tiles) {
  pack<int8_t, 1>(codes, order, n, k, tiles);
}

EXPORT void shoal_pack_int4(const uint8_t* codes, const int64_t* order, int n, int k,
                            uint8_t* tiles) {
  pack_nibbles(codes, order, n, k, tiles);
}

EXPORT int shoal_can_round() { return CAN_ROUND<int8_t>; }

EXPORT void shoal_start(int num_threads) { start_pool(num_threads); }
