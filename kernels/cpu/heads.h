// Operations on rows and heads: norms, scaling, softcap, conversion, rotary embedding.
#pragma once

#include "product.h"

// Σ x² of x [size]; size is a multiple of 16.
INLINE float sum_squares(const float* x, int size) {
  f32x16 squares = zero();
  for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  return sum(squares);
}

// Factor of an RMS norm over `size` elements with this sum of squares.
INLINE f32x16 norm_scale(float squares, int size, float eps) {
  return spread(1.0f / __builtin_sqrtf(squares / size + eps));
}

// RMS norm of x [size], without a weight → out
INLINE void norm(const float* x, int size, float eps, float* out) {
  f32x16 scale = norm_scale(sum_squares(x, size), size, eps);
  for (int i = 0; i < size; i += LANES) store(out + i, mul(load(x + i), scale));
}

// x [size] · scale · weight → out
template <class Out>
INLINE void scale_norm(const float* x, f32x16 scale, const float* weight, int size, Out* out) {
  for (int i = 0; i < size; i += LANES)
    store_narrow(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// RMS norm of x [size] · weight → out
template <class Out>
INLINE void norm(const float* x, const float* weight, int size, float eps, Out* out) {
  scale_norm(x, norm_scale(sum_squares(x, size), size, eps), weight, size, out);
}

// out [size] += RMS norm of x · weight
INLINE void add_norm(const float* x, const float* weight, int size, float eps, float* out) {
  f32x16 scale = norm_scale(sum_squares(x, size), size, eps);
  for (int i = 0; i < size; i += LANES)
    store(out + i, fma(mul(load(x + i), scale), load(weight + i), load(out + i)));
}

// Layer norm of x [size] · weight + bias → out; bias may be null, out may be x.
template <class Out>
INLINE void layer_norm(const float* x, const float* weight, const float* bias, int size, float eps,
                       Out* out) {
  f32x16 total = zero(), squares = zero();
  for (int i = 0; i < size; i += LANES) total = add(total, load(x + i));
  f32x16 mean = spread(sum(total) / size);
  for (int i = 0; i < size; i += LANES) {
    f32x16 centred = sub(load(x + i), mean);
    squares = fma(centred, centred, squares);
  }
  f32x16 scale = norm_scale(sum(squares), size, eps);
  for (int i = 0; i < size; i += LANES) {
    f32x16 scaled = mul(sub(load(x + i), mean), scale);
    store_narrow(out + i, fma(scaled, load(weight + i), bias ? load(bias + i) : zero()));
  }
}

// Calls f with the offset of each of num_rows rows of `size`; a thread takes GROUP rows at a time.
template <class F>
void each_row(int num_rows, int size, F f) {
  constexpr int GROUP = 8;
  auto rows = [=](int item) {
    int end = (item + 1) * GROUP < num_rows ? (item + 1) * GROUP : num_rows;
    for (int r = item * GROUP; r < end; r++) f((size_t)r * size);
  };
  share(rows, div_up(num_rows, GROUP));
}

template <class T>
void norm_rows(const float* x, const float* weight, int num_rows, int size, float eps, T* out) {
  each_row(num_rows, size, [=](size_t at) { norm(x + at, weight, size, eps, out + at); });
}

template <class T>
void layer_norm_rows(const float* x, const float* weight, const float* bias, int num_rows, int size,
                     float eps, T* out) {
  each_row(num_rows, size,
           [=](size_t at) { layer_norm(x + at, weight, bias, size, eps, out + at); });
}

inline void add_norm_rows(const float* x, const float* weight, int num_rows, int size, float eps,
                          float* out) {
  each_row(num_rows, size, [=](size_t at) { add_norm(x + at, weight, size, eps, out + at); });
}

// For rows of any size.
inline void scale_rows(float* x, int num_rows, int size, float scale) {
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i++) x[at + i] *= scale;
  });
}

// out += x
inline void add_rows(const float* x, int num_rows, int size, float* out) {
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i++) out[at + i] += x[at + i];
  });
}

// x → most · tanh(x / most), for rows of any size; NaN and infinities become NaN.
inline void bend_rows(float* x, int num_rows, int size, float most) {
  f32x16 inner = spread(1 / most), outer = spread(most);
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i += LANES) {
      int num = size - i < LANES ? size - i : LANES;
      f32x16 given = load_some(x + at + i, num);
      f32x16 bent = mul(tanh(mul(given, inner)), outer);
      store_some(x + at + i, fma(given, zero(), bent), num);
    }
  });
}

template <class T>
void narrow_rows(const float* x, int num_rows, int size, T* out) {
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i += LANES) store_narrow(out + at + i, load(x + at + i));
  });
}

// out ← sigmoid(gates) · out
template <class T>
void gate_rows(const float* gates, int num_rows, int size, T* out) {
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i += LANES) {
      f32x16 gate = load(gates + at + i);
      store_narrow(out + at + i, mul(or_nan(gate, sigmoid(gate)), load_wide(out + at + i)));
    }
  });
}

// act(gates) · `size` elements of rows of `stride` → out, with an act of `opened`
template <class T>
void activate_rows(const float* gates, int num_rows, int size, float alpha, float beta,
                   const float* x, int stride, T* out) {
  each_row(num_rows, size, [=](size_t at) {
    const float* row = x + at / size * stride;
    for (int i = 0; i < size; i += LANES)
      store_narrow(out + at + i, mul(opened(load(gates + at + i), alpha, beta), load(row + i)));
  });
}

// Rotary embedding of the first `dim` elements of a head, in place. Pairs are i and i + dim / 2, or
// neighbours; `sin` is negated for the first element of each pair.
INLINE void rotate(float* head, const float* cos, const float* sin, int dim, bool is_interleaved) {
  int half = dim / 2;
  for (int i = 0; i < half; i++) {
    int a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
    float first = head[a], second = head[b];
    head[a] = first * cos[a] + second * sin[a];
    head[b] = second * cos[b] + first * sin[b];
  }
}
