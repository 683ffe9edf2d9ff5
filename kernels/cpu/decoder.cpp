// The layers of a decoder on the CPU, for ctypes: see kernels/cpu/decoder.py for what is passed.

#include "attention.h"

namespace {

struct Matrix {
  const void* tiles;
  const float* bias;
  int32_t n, k;
};

struct Layer {
  const float* input_norm;
  Matrix qkv;
  const float *query_norm, *key_norm;  // [head_dim] or null
  Matrix out;
  const float* post_norm;
  Matrix gate_up, down;
};

struct Shape {
  int32_t hidden, num_heads, num_kv_heads, head_dim, is_interleaved, block_size;
  float eps, scale;
  const float *cos, *sin;  // [positions, head_dim]
};

struct Step {
  void* const* caches;  // one for each layer
  int32_t num_tokens;
  const int64_t *positions, *slot_mapping;  // [num_tokens]
  Rows rows;
  float* x;        // [num_tokens, hidden]
  void* normed;    // [num_tokens, hidden]
  float* heads;    // [num_tokens, num_heads + 2 · num_kv_heads, head_dim]
  void* query;     // [num_tokens, num_heads, head_dim]
  void* attended;  // the same
  void* gated;     // [num_tokens, intermediate]
};

Units units;
Sums* partials = nullptr;
int num_sums = 0;

template <class T>
Packed<T> packed(const Matrix& m) {
  return {(const T*)m.tiles, m.bias, m.n, m.k};
}

// Norms and rotates the heads of every token, and writes its keys and values.
template <class T>
struct Prepare {
  const Shape& shape;
  const Layer& layer;
  const Step& step;
  Cache<T> cache;
  static constexpr int GROUP = 4;

  void run() { share(*this, div_up(step.num_tokens, GROUP)); }

  void operator()(int item) {
    int end = (item + 1) * GROUP;
    for (int t = item * GROUP; t < end && t < step.num_tokens; t++) token(t);
  }

  void token(int t) {
    int dim = shape.head_dim, num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads;
    const float* cos = shape.cos + step.positions[t] * dim;
    const float* sin = shape.sin + step.positions[t] * dim;
    float* head = step.heads + (size_t)t * (num_heads + 2 * num_kv_heads) * dim;
    T* query = (T*)step.query + (size_t)t * num_heads * dim;
    for (int h = 0; h < num_heads + num_kv_heads; h++, head += dim) {
      const float* weight = h < num_heads ? layer.query_norm : layer.key_norm;
      if (weight) norm(head, weight, dim, shape.eps, head);
      rotate(head, cos, sin, dim, shape.is_interleaved);
      if (h < num_heads)
        for (int i = 0; i < dim; i += LANES) store_narrow(query + h * dim + i, load(head + i));
    }
    // All are written before any is attended to, so what follows in a block is there or comes
    // later.
    bool is_last = t + 1 == step.num_tokens || step.slot_mapping[t + 1] != step.slot_mapping[t] + 1;
    for (int h = 0; h < num_kv_heads; h++, head += dim)
      cache.write(step.slot_mapping[t], h, head - num_kv_heads * dim, head, is_last);
  }
};

// What attention needs for all layers alike.
void begin(const Shape& shape, const Step& step) {
  units.prepare(step.rows, shape.num_heads / shape.num_kv_heads, shape.num_kv_heads);
  int wanted = units.num_partials() * shape.num_heads;
  if (wanted > num_sums) {
    free(partials);
    partials = (Sums*)malloc(wanted * sizeof(Sums));
    num_sums = wanted;
  }
}

template <class T>
void run_layer(const Shape& shape, const Layer& layer, const Step& step, T* blocks) {
  int num = step.num_tokens;
  T *normed = (T*)step.normed, *attended = (T*)step.attended, *gated = (T*)step.gated;
  Cache<T> cache = {blocks, shape.block_size, shape.num_kv_heads, shape.head_dim};
  norm_rows(step.x, layer.input_norm, num, shape.hidden, shape.eps, normed);
  product(normed, num, packed<T>(layer.qkv), step.heads);
  Prepare<T>{shape, layer, step, cache}.run();
  Attention<T>{step.rows, cache,    units,           (const T*)step.query,
               attended,  partials, shape.num_heads, shape.scale}
      .run();
  add_product(attended, num, packed<T>(layer.out), step.x);
  norm_rows(step.x, layer.post_norm, num, shape.hidden, shape.eps, normed);
  gated_product(normed, num, packed<T>(layer.gate_up), gated);
  add_product(gated, num, packed<T>(layer.down), step.x);
}

// w [n, k] → tiles; column c of the packed matrix is row `order[c]` of w, or 0 where that is −1.
template <class T>
void pack(const T* w, const int64_t* order, int n, int k, T* tiles) {
  auto tile = [=](int index) {
    T* to = tiles + (size_t)index * LANES * k;
    for (int lane = 0; lane < LANES; lane++) {
      int column = index * LANES + lane;
      const T* row = column < n ? w + order[column] * k : nullptr;
      for (int i = 0; i < k; i++)
        to[(i / DEPTH<T> * LANES + lane) * DEPTH<T> + i % DEPTH<T>] = row ? row[i] : T();
    }
  };
  share(tile, div_up(n, LANES));
}

// The columns `ids` of a packed matrix as rows of x [num, k].
template <class T>
void unpack(const Packed<T>& w, const int32_t* ids, int num, float* x) {
  for (int r = 0; r < num; r++) {
    const T* tile = w.tile(ids[r] / LANES) + ids[r] % LANES * DEPTH<T>;
    for (int i = 0; i < w.k; i++)
      x[(size_t)r * w.k + i] = widen(tile[i / DEPTH<T> * LANES * DEPTH<T> + i % DEPTH<T>]);
  }
}

template <class T>
void run_head(const float* hidden, int num, const float* weight, float eps, const Matrix& matrix,
              T* normed, float* logits) {
  norm_rows(hidden, weight, num, matrix.k, eps, normed);
  product(normed, num, packed<T>(matrix), logits);
}

}  // namespace

#define EACH_TYPE(name, T)                                                                         \
  EXPORT void shoal_pack_##name(const T* w, const int64_t* order, int n, int k, T* tiles) {        \
    pack(w, order, n, k, tiles);                                                                   \
  }                                                                                                \
  EXPORT void shoal_unpack_##name(const Matrix* w, const int32_t* ids, int num, float* x) {        \
    unpack(packed<T>(*w), ids, num, x);                                                            \
  }                                                                                                \
  EXPORT void shoal_layers_##name(const Shape* shape, const Layer* layers, int num_layers,         \
                                  const Step* step) {                                              \
    begin(*shape, *step);                                                                          \
    for (int i = 0; i < num_layers; i++) run_layer(*shape, layers[i], *step, (T*)step->caches[i]); \
  }                                                                                                \
  EXPORT void shoal_head_##name(const float* hidden, int num, const float* weight, float eps,      \
                                const Matrix* matrix, T* normed, float* logits) {                  \
    run_head(hidden, num, weight, eps, *matrix, normed, logits);                                   \
  }

EACH_TYPE(bfloat16, bf16)
EACH_TYPE(float32, float)

EXPORT void shoal_start(int num_threads) { start_pool(num_threads); }
