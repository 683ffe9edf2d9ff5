// Packed matrices as passed by ctypes: see kernels/cpu/operators.py.
#pragma once

#include "rounded.h"

enum Form : int32_t { DENSE, INT8, GROUPED_INT4, GROUPED_INT8, GROUPED_FP8 };

// Fields of Packed; `form` selects its type.
struct Matrix {
  const void* tiles;
  const float* bias;
  const void* scales;
  const CodeTable* table;
  int32_t n, k;
  int32_t form, group, has_zeros, is_wide, rounds;
};

template <class W>
Packed<W> packed(const Matrix& m) {
  Packed<W> w;
  w.tiles = (decltype(w.tiles))m.tiles, w.scales = (decltype(w.scales))m.scales;
  w.bias = m.bias, w.n = m.n, w.k = m.k, w.rounds = m.rounds;
  if constexpr (HAS_GROUPS<W>)
    w.table = m.table, w.group = m.group, w.num_groups = div_up(m.k, m.group),
    w.has_zeros = m.has_zeros, w.is_wide = m.is_wide;
  return w;
}

// Calls f with m as the Packed of its form.
template <class T, class F>
void with_packed(const Matrix& m, F f) {
  switch (m.form) {
    case DENSE:
      return f(packed<T>(m));
    case INT8:
      return f(packed<int8_t>(m));
    case GROUPED_INT4:
      return f(packed<Grouped<nibble>>(m));
    case GROUPED_INT8:
      return f(packed<Grouped<int8_t>>(m));
    case GROUPED_FP8:
      return f(packed<Grouped<fp8>>(m));
  }
}
