// Chooses the experts of a token and computes their weights: see kernels/route for the definition.
#pragma once

#include <math.h>

#include "heads.h"
#include "select.h"

enum Score : int32_t { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

struct Routing {
  int32_t num_experts, num_chosen, score;
  int32_t num_groups, num_kept_groups, group_best;
  int32_t renormalises;
  float min_sum, factor;
  const float* correction;  // [num_experts] or null
  const float* factors;     // of the weights, [num_experts], or null
};

// Softmax of n values; `out` has room for padded(n).
INLINE void softmax(const float* x, int n, float* out) {
  f32x16 tops = spread(-INFINITY), sums = zero();
  each(x, n, -INFINITY, [&](int, f32x16 now) { tops = max(tops, now); });
  f32x16 top = spread(highest(tops));
  each(x, n, -INFINITY, [&](int i, f32x16 now) {
    f32x16 power = exp(sub(now, top));
    store(out + i, power);
    sums = add(sums, power);
  });
  f32x16 total = spread(sum(sums));
  for (int i = 0; i < n; i += LANES) store(out + i, div(load(out + i), total));
}

INLINE void sigmoid(const float* x, int n, float* out) {
  each(x, n, 0, [=](int i, f32x16 now) { store(out + i, sigmoid(now)); });
}

// Indices of the `num` highest of x [n], descending, ties by lowest index. Sets x to −∞ there.
INLINE void take_highest(float* x, int n, int num, int32_t* places) {
  for (int j = 0; j < num; j++) {
    int place = 0;
    for (int i = 1; i < n; i++)
      if (x[i] > x[place]) place = i;
    places[j] = place;
    x[place] = -INFINITY;
  }
}

// Sets the experts outside the kept groups to −∞ in `ranked`. `groups` and `places` have room for
// one element per group.
INLINE void keep_groups(const Routing& r, float* ranked, float* groups, int32_t* places) {
  int size = r.num_experts / r.num_groups;
  for (int g = 0; g < r.num_groups; g++) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; i++) {
      float now = ranked[i], lower = now > best ? best : now;
      if (now > best) best = now;
      if (lower > second) second = lower;
    }
    groups[g] = r.group_best == 2 ? best + second : best;
  }
  take_highest(groups, r.num_groups, r.num_kept_groups, places);
  for (int g = 0; g < r.num_groups; g++) {
    bool is_kept = false;
    for (int j = 0; j < r.num_kept_groups; j++) is_kept |= places[j] == g;
    for (int i = g * size; i < (g + 1) * size && !is_kept; i++) ranked[i] = -INFINITY;
  }
}

// A token's experts, best first, and their weights [num_chosen].
inline void route(const Routing& r, const float* logits, int32_t* chosen, float* weights) {
  int n = r.num_experts, room = padded(n);
  float* scores = scratch(n);
  float *ranked = scores + room, *groups = ranked + room;
  if (r.score == SOFTMAX)
    softmax(logits, n, scores);
  else if (r.score == SIGMOID)
    sigmoid(logits, n, scores);
  else
    memcpy(scores, logits, n * sizeof(float));
  for (int i = 0; i < n; i++) ranked[i] = scores[i] + (r.correction ? r.correction[i] : 0);
  if (r.num_kept_groups < r.num_groups) keep_groups(r, ranked, groups, (int32_t*)(groups + room));
  take_highest(ranked, n, r.num_chosen, chosen);
  for (int j = 0; j < r.num_chosen; j++) groups[j] = scores[chosen[j]];
  if (r.score == SOFTMAX_OF_CHOSEN) softmax(groups, r.num_chosen, groups);
  float total = 0;
  for (int j = 0; j < r.num_chosen; j++) total += groups[j];
  if (total < r.min_sum) total = r.min_sum;
  for (int j = 0; j < r.num_chosen; j++) {
    weights[j] = (r.renormalises ? groups[j] / total : groups[j]) * r.factor;
    if (r.factors) weights[j] *= r.factors[chosen[j]];
  }
}
