// Finds the k-th highest value or the top-p threshold of a row without sorting.
#pragma once

#include <math.h>
#include <stdlib.h>

#include "words.h"

// x[i … i + 15] of a row of n, padded with `pad`.
INLINE f32x16 load_padded(const float* x, int i, int n, float pad) {
  return i + LANES <= n ? load(x + i) : first(n - i, load_some(x + i, n - i), spread(pad));
}

// Calls f(i, x[i … i + 15]) for a row of n.
template <class F>
INLINE void each(const float* x, int n, float pad, F f) {
  for (int i = 0; i < n; i += LANES) f(i, load_padded(x, i, n, pad));
}

inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

// 4 · padded(n) floats of the thread's own memory, which only grows.
inline float* scratch(int n) {
  static thread_local float* memory = nullptr;
  static thread_local int size = 0;
  if (padded(n) > size) {
    free(memory);
    size = padded(n);
    memory = (float*)malloc(4 * sizeof(float) * size);
  }
  return memory;
}

// Calls f(lane) for each bit of a mask.
template <class F>
INLINE void each_lane(uint32_t mask, F f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

// Words in the order of the values, as unsigned integers; −0 equals 0.
INLINE u32x16 order(f32x16 x) {
  u32x16 bits = bits_of(add(x, zero()));
  return differ(bits, either(shift_signed(bits, 31), spread_word(0x80000000)));
}

INLINE float from_order(uint32_t word) {
  uint32_t bits = word & 0x80000000 ? word ^ 0x80000000 : ~word;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The highest v for which the weights of all x ≥ v add up to `wanted` or more, else `least`;
// elements below `least` have no weight. A radix search over the words of `order`, eight bits at a
// time, upper bits first.
template <class Weight>
float radix_select(const float* x, int n, float least, double wanted, Weight weight) {
  double beyond = 0;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double bins[256] = {};
    each(x, n, -INFINITY, [&](int i, f32x16 now) {
      uint32_t mask = at_least(now, spread(least));
      if (!mask) return;
      u32x16 words = order(now);
      if (shift < 24) mask &= equal(shift_right(words, shift + 8), spread_word(prefix));
      if (!mask) return;
      uint32_t bin[LANES];
      store(bin, both(shift_right(words, shift), spread_word(255)));
      each_lane(mask, [&](int lane) { bins[bin[lane]] += weight(i + lane); });
    });
    int found = 255;
    // Empty bins are skipped: `wanted` may have been rounded to 0.
    for (; found > 0 && !(bins[found] > 0 && beyond + bins[found] >= wanted); found--)
      beyond += bins[found];
    prefix = prefix << 8 | found;
  }
  float v = from_order(prefix);
  return v > least ? v : least;
}

// The k-th highest of x [n], 1 ≤ k ≤ n. The k-th highest of group maxima is a lower bound, so
// smaller elements are skipped. `spare` [n / 8] is for the maxima.
inline float kth_highest(const float* x, int n, int k, float* spare) {
  float least = -INFINITY;
  int num_groups = n / (LANES * LANES) * LANES;
  if (num_groups >= 2 * k) {
    for (int g = 0; g < num_groups; g += LANES) {
      f32x16 top = load(x + g * LANES);
      for (int i = 1; i < LANES; i++) top = max(top, load(x + (g + i) * LANES));
      store(spare + g, top);
    }
    least = kth_highest(spare, num_groups, k, spare + num_groups);
  }
  return radix_select(x, n, least, k, [](int) { return 1.0; });
}

// Σ term(i, x[i … i + 15]) in double; x is padded with −∞.
template <class Term>
INLINE double sum_terms(const float* x, int n, Term term) {
  double total = 0;
  f32x16 some = zero();
  each(x, n, -INFINITY, [&](int i, f32x16 now) {
    some = add(some, term(i, now));
    if (i % 256 == 240) {
      total += sum(some);
      some = zero();
    }
  });
  return total + sum(some);
}

// Σ e^(x − top) over x ≥ least, in double; the terms → w [padded(n)] if it is not null.
INLINE double sum_exp(const float* x, int n, float top, float least, float* w) {
  return sum_terms(x, n, [=](int i, f32x16 now) {
    f32x16 term = pick(now, spread(least), exp(sub(now, spread(top))), zero());
    if (w) store(w + i, term);
    return term;
  });
}
