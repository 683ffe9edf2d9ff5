// Samples tokens from rows of logits, called with ctypes: see kernels/cpu/sampler.py for the
// arguments and kernels/sample for the definition.

#include <float.h>

#include "noise.h"
#include "pool.h"
#include "select.h"

namespace {

constexpr int64_t NOT_FINITE = -1, NOTHING_LEFT = -2;
// The largest gap that noise can close, and the largest noise; see kernels/sample/gumbel.py.
constexpr float MAX_GAP = 20.0f, MAX_NOISE = 17.0f;

// Sampling parameters of `num` rows of the logits, in ascending order of rows.
struct RandomRows {
  int32_t num;
  const int64_t *rows, *positions;
  const float* temperature;
  const int64_t* top_k;
  const float *top_p, *min_p, *top_n_sigma;
  const int64_t *seeds, *choices;

  // Index of a row's parameters, or −1 for a greedy row.
  int find(int row) const {
    int low = 0, high = num;
    while (low < high) {
      int middle = (low + high) / 2;
      if (rows[middle] < row)
        low = middle + 1;
      else
        high = middle;
    }
    return low < num && rows[low] == row ? low : -1;
  }
};

struct Extent {
  float top;
  bool is_finite;  // has neither NaN nor infinities
};

Extent measure(const float* x, int n) {
  f32x16 top = spread(x[0]), nothing = zero();
  each(x, n, x[0], [&](int, f32x16 now) {
    top = max(top, now);
    nothing = fma(now, zero(), nothing);
  });
  return {highest(top), sum(nothing) == 0};
}

int64_t first_equal(const float* x, int n, float value) {
  for (int i = 0; i < n; i += LANES) {
    uint32_t mask = equal(load_padded(x, i, n, NAN), spread(value));
    if (mask) return i + __builtin_ctz(mask);
  }
  return NOT_FINITE;
}

// Standard deviation of the elements of x [n] above −∞.
float deviation(const float* x, int n) {
  const f32x16 lowest = spread(-FLT_MAX);
  double num =
      sum_terms(x, n, [=](int, f32x16 now) { return pick(now, lowest, spread(1), zero()); });
  double total = sum_terms(x, n, [=](int, f32x16 now) { return pick(now, lowest, now, zero()); });
  num = num > 0 ? num : 1;
  f32x16 mean = spread((float)(total / num));
  double squares = sum_terms(x, n, [=](int, f32x16 now) {
    f32x16 gap = sub(now, mean);
    return pick(now, lowest, mul(gap, gap), zero());
  });
  return (float)sqrt(squares / num);
}

// Top-p: the lowest score of the smallest set of highest scores with a share `top_p` of the mass.
float nucleus(const float* scores, int n, float top, float top_p, float least, float* spare) {
  double wanted = top_p * sum_exp(scores, n, top, least, spare);
  return radix_select(scores, n, least, wanted, [=](int i) { return spare[i]; });
}

// logits [n] → scores [padded(n)] to sample from, −∞ for excluded tokens; `spare` is as large.
// Returns the highest score.
float make_scores(const float* logits, int n, float top, const RandomRows& random, int r,
                  float* scores, float* spare) {
  f32x16 temperature = spread(random.temperature[r]);
  each(logits, n, -INFINITY, [&](int i, f32x16 now) { store(scores + i, div(now, temperature)); });
  top /= random.temperature[r];
  n = padded(n);
  float least = -INFINITY, kth;
  if (random.min_p[r] > 0) least = top + log_of(random.min_p[r]);
  if (random.top_n_sigma[r] > 0)
    least = fmaxf(least, top - random.top_n_sigma[r] * deviation(scores, n));
  if (random.top_k[r] > 0 && random.top_k[r] < n) {
    kth = kth_highest(scores, n, (int)random.top_k[r], spare);
    least = kth > least ? kth : least;
  }
  if (random.top_p[r] < 1) least = nucleus(scores, n, top, random.top_p[r], least, spare);
  if (least == -INFINITY) return top;
  each(scores, n, 0, [&](int i, f32x16 now) {
    store(scores + i, pick(now, spread(least), now, spread(-INFINITY)));
  });
  return top;
}

// Gumbel-max over scores [n], n a multiple of 16; tokens that cannot win get no noise.
int64_t sample_row(const float* scores, int n, float top, const BitKey& key) {
  float best = -INFINITY, least = top - MAX_GAP;
  int64_t found = 0;
  for (int i = 0; i < n; i += LANES) {
    f32x16 now = load(scores + i);
    if (!at_least(now, spread(least))) continue;
    f32x16 noisy = add(now, gumbel(random_bits(key, plus(spread_word(i), count_up()))));
    if (!above(noisy, spread(best))) continue;
    best = highest(noisy);
    found = i + __builtin_ctz(equal(noisy, spread(best)));
    if (best - MAX_NOISE > least) least = best - MAX_NOISE;
  }
  return found;
}

struct Sample {
  const float* logits;    // [rows, num_computed], before adjustments; must be finite
  const float* adjusted;  // [rows, n]
  int n, num_computed;
  const RandomRows& random;
  int64_t* tokens;

  void operator()(int row) { tokens[row] = token(row); }

  int64_t token(int row) {
    const float *raw = logits + (size_t)row * num_computed, *x = adjusted + (size_t)row * n;
    Extent extent = measure(raw, num_computed);
    if (!extent.is_finite) return NOT_FINITE;
    float top = adjusted == logits ? extent.top : measure(x, n).top;
    if (top == -INFINITY) return NOTHING_LEFT;
    int r = random.find(row);
    if (r < 0) return first_equal(x, n, top);
    float* scores = scratch(n);
    top = make_scores(x, n, top, random, r, scores, scores + padded(n));
    BitKey key = {(uint64_t)random.seeds[r], (uint32_t)random.positions[r],
                  (uint32_t)random.choices[r], 0};
    return sample_row(scores, padded(n), top, key);
  }
};

struct Process {
  const float* logits;  // [rows, n]
  int n;
  const RandomRows& random;
  float* out;  // [rows, n]

  void operator()(int row) {
    const float* x = logits + (size_t)row * n;
    int r = random.find(row);
    float* scores = scratch(n);
    if (r >= 0) make_scores(x, n, measure(x, n).top, random, r, scores, scores + padded(n));
    memcpy(out + (size_t)row * n, r < 0 ? x : scores, n * sizeof(float));
  }
};

// Sets logits to −∞ where the bit in the row's mask is 0: id i is bit i % 32 of word i // 32.
struct Hide {
  float* logits;  // [_, n]
  const int64_t* rows;
  const uint32_t* masks;  // [rows, words]
  int n, num_words;

  void operator()(int item) {
    float* x = logits + (size_t)rows[item] * n;
    const uint32_t* words = masks + (size_t)item * num_words;
    int i = 0;
    for (; i + 32 <= n; i += 32) hide(x + i, words[i / 32], 32);
    if (i < n) hide(x + i, words[i / 32], n - i);
  }

  static inline void hide(float* x, uint32_t word, int num) {
    for (int i = 0; i < num; i++) x[i] = word >> i & 1 ? x[i] : -INFINITY;
  }
};

}  // namespace

EXPORT void shoal_hide(float* logits, const int64_t* rows, const uint32_t* masks, int n,
                       int num_rows, int num_words) {
  Hide job = {logits, rows, masks, n, num_words};
  share(job, num_rows);
}

EXPORT void shoal_sample(const float* logits, const float* adjusted, int num_rows, int n,
                         int num_computed, const RandomRows* random, int64_t* tokens) {
  Sample job = {logits, adjusted, n, num_computed, *random, tokens};
  share(job, num_rows);
}

EXPORT void shoal_process(const float* logits, int num_rows, int n, const RandomRows* random,
                          float* out) {
  Process job = {logits, n, *random, out};
  share(job, num_rows);
}

// For tests: random bits of `num` ids from `first_id` on, and the noise of random bits; `num` is a
// multiple of 16.
EXPORT void shoal_random_bits(int64_t seed, int64_t position, int64_t choice, int64_t purpose,
                              uint32_t first_id, int num, uint32_t* key) {
  BitKey row = {(uint64_t)seed, (uint32_t)position, (uint32_t)choice, (uint32_t)purpose};
  for (int i = 0; i < num; i += LANES)
    store(key + i, random_bits(row, plus(spread_word(first_id + i), count_up())));
}

EXPORT void shoal_noise(const uint32_t* key, int num, float* noise) {
  for (int i = 0; i < num; i += LANES)
    store(noise + i, gumbel(bits_of(load((const float*)(key + i)))));
}
