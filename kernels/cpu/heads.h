// What happens to single rows and heads: norms and rotation.
#pragma once

#include "product.h"

// Σ x² of x [size]; sizes are multiples of 16.
INLINE float sum_squares(const float* x, int size) {
  f32x16 squares = zero();
  for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  return sum(squares);
}

// What a root-mean-square norm multiplies `size` numbers of such squares by.
INLINE f32x16 norm_scale(float squares, int size, float eps) {
  return spread(1.0f / __builtin_sqrtf(squares / size + eps));
}

// x [size] times scale and weight → out.
template <class Out>
INLINE void scale_norm(const float* x, f32x16 scale, const float* weight, int size, Out* out) {
  for (int i = 0; i < size; i += LANES)
    store_narrow(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// The norm of x [size] times weight → out.
template <class Out>
INLINE void norm(const float* x, const float* weight, int size, float eps, Out* out) {
  scale_norm(x, norm_scale(sum_squares(x, size), size, eps), weight, size, out);
}

// The same times weight, added to out [size].
INLINE void add_norm(const float* x, const float* weight, int size, float eps, float* out) {
  f32x16 scale = norm_scale(sum_squares(x, size), size, eps);
  for (int i = 0; i < size; i += LANES)
    store(out + i, fma(mul(load(x + i), scale), load(weight + i), load(out + i)));
}

// Calls f with the place of each of num_rows rows of `size`, in items for all threads.
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

inline void add_norm_rows(const float* x, const float* weight, int num_rows, int size, float eps,
                          float* out) {
  each_row(num_rows, size, [=](size_t at) { add_norm(x + at, weight, size, eps, out + at); });
}

// The sizes of rows that are scaled may be any.
inline void scale_rows(float* x, int num_rows, int size, float scale) {
  each_row(num_rows, size, [=](size_t at) {
    for (int i = 0; i < size; i++) x[at + i] *= scale;
  });
}

// x → most · tanh(x / most), of rows of any size; what is not finite becomes NaN.
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

// Rotates the first `dim` numbers of a head in place: each by its partner's angle. The pairs are
// the halves' elements or neighbours; `sin` is negative for the first of each.
INLINE void rotate(float* head, const float* cos, const float* sin, int dim, bool is_interleaved) {
  int half = dim / 2;
  for (int i = 0; i < half; i++) {
    int a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
    float first = head[a], second = head[b];
    head[a] = first * cos[a] + second * sin[a];
    head[b] = second * cos[b] + first * sin[b];
  }
}
