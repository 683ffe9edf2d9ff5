// Mixture of experts.
//
// Tokens are sorted by expert, so that an expert's weights are read once for all its tokens.
// Outputs are kept for each pair of token and expert and added in order of choice: a row's result
// does not depend on the other rows of its batch.
#pragma once

#include "adapt_experts.h"
#include "products.h"
#include "route.h"

// Same layout as ExpertsStruct in kernels/cpu/operators.py.
struct Experts {
  Routing routing;
  Matrix router;                 // in float32
  const Matrix *gate_up, *down;  // of each local expert, all in one form
  float alpha, beta, limit;      // parameters of Gate
  int32_t first, num;            // the local experts; other ranks have the rest
  int64_t* counts;               // [num_experts]: tokens routed to each so far, or null
};

// The tokens that take some experts: all of them, those with a mark, or those without.
struct Takers {
  const float* marks;  // [tokens, size]: the first number of a row is 0 or not; null: all tokens
  size_t size;
  bool are_marked;

  bool has(size_t token) const { return !marks || (marks[token * size] != 0) == are_marked; }
};

// Pairs of a token and a chosen expert, sorted by expert. Tokens that take none have chosen one
// more than there are.
struct Pairs {
  int32_t* chosen;  // [tokens, num_chosen]
  float* weights;   // [tokens, num_chosen]
  int32_t* places;  // [tokens, num_chosen]: index of the pair in sorted order
  int32_t* tokens;  // [pairs], sorted
  int32_t* starts;  // [num_experts + 2]: first pair of each expert

  // `order` of tokens within an expert [num_tokens]; null: ascending.
  void arrange(int num_tokens, const Routing& r, const int32_t* order) {
    int num = num_tokens * r.num_chosen, end = r.num_experts + 1;
    memset(starts, 0, (end + 1) * sizeof(int32_t));
    for (int i = 0; i < num; i++) starts[chosen[i] + 1]++;
    for (int e = 0; e < end; e++) starts[e + 1] += starts[e];
    for (int t = 0; t < num_tokens; t++) {
      int token = order ? order[t] : t, first = token * r.num_chosen;
      for (int i = first; i < first + r.num_chosen; i++) {
        places[i] = starts[chosen[i]]++;
        tokens[places[i]] = token;
      }
    }
    for (int e = end; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
  }
};

inline Scratch<int32_t> pair_numbers;
inline Scratch<float> pair_floats;   // weights, then the router's logits
inline Scratch<float> pair_outputs;  // [pairs, hidden]
template <class T>
inline Scratch<T> pair_rows;  // [pairs, hidden]: inputs
template <class T>
inline Scratch<T> pair_inner;  // [pairs, inner]

// Multiplies each expert's rows, starts[e] … starts[e + 1] − 1, with its matrix; all matrices are
// of W. make(w, start) returns the receiver of the sums of rows from `start` on.
template <class P, class T, class W, class Make>
void multiply_experts(const int32_t* starts, int num_experts, const Matrix* matrices, const T* rows,
                      int unit, Make make) {
  static Scratch<P> products;
  static Scratch<int> ends;
  Products<P> all = {products.of(num_experts), ends.of(num_experts)};
  for (int e = 0; e < num_experts; e++) {
    int start = starts[e], num = starts[e + 1] - start;
    if (!num) continue;
    Packed<W> w = packed<W>(matrices[e]);
    all.each[all.num++] = P{rows + (size_t)start * w.k, num, w, make(w, start)};
  }
  all.run(unit);
}

// The same for matrices of any form, equal for all experts.
template <class T, class Make>
void multiply_experts(const int32_t* starts, int num_experts, const Matrix* matrices, const T* rows,
                      int unit, Make make) {
  with_packed<T>(matrices[0], [&](auto first) {
    typedef typename decltype(first)::Numbers W;
    typedef decltype(make(first, 0)) Out;
    if constexpr (CAN_ROUND<W>)
      if (first.rounds)
        return multiply_experts<RoundedProduct<T, W, Out>, T, W>(starts, num_experts, matrices,
                                                                 rows, unit, make);
    multiply_experts<Product<T, W, Out>, T, W>(starts, num_experts, matrices, rows, unit, make);
  });
}

// out [tokens, size] += scale · Σ of weight · output over the local experts of each of the takers.
// `rows` [tokens, size] are their inputs in the weights' type, `wide` the router's in float32.
// `adapt`: see ExpertChanges, or null.
template <class T>
void run_experts(const Experts& experts, const Takers& takers, const Adapt* adapt, const T* rows,
                 const float* wide, int num_tokens, float scale, float* out) {
  const Routing& routing = experts.routing;
  int num_chosen = routing.num_chosen, num_experts = routing.num_experts;
  int num = num_tokens * num_chosen;
  size_t size = experts.gate_up[0].k, inner_size = experts.down[0].k;
  float* weights = pair_floats.of(num + (size_t)num_tokens * num_experts);
  float* logits = weights + num;
  int32_t* numbers = pair_numbers.of(3 * (size_t)num + num_experts + 2);
  Pairs pairs = {numbers, weights, numbers + num, numbers + 2 * num, numbers + 3 * num};

  product(wide, num_tokens, packed<float>(experts.router), logits);
  ExpertChanges<T> changes(adapt, num_tokens, num);
  changes.add_to_logits(wide, experts.router.k, num_experts, logits);
  each_row(num_tokens, num_experts, [=](size_t at) {
    size_t token = at / num_experts;
    int32_t* chosen = pairs.chosen + token * num_chosen;
    route(routing, logits + at, chosen, weights + token * num_chosen);
    if (!takers.has(token))
      for (int i = 0; i < num_chosen; i++) chosen[i] = num_experts;
  });
  pairs.arrange(num_tokens, routing, changes.order);
  if (experts.counts)
    for (int e = 0; e < num_experts; e++)
      experts.counts[e] += pairs.starts[e + 1] - pairs.starts[e];

  const int32_t* starts = pairs.starts + experts.first;
  int begin = starts[0], end = starts[experts.num];
  T* gathered = pair_rows<T>.of(num * size);
  T* inner = pair_inner<T>.of(num * inner_size);
  float* outputs = pair_outputs.of(num * size);
  each_row(end - begin, 1, [=](size_t at) {
    size_t i = begin + at;
    memcpy(gathered + i * size, rows + pairs.tokens[i] * size, size * sizeof(T));
  });
  int gates_size = experts.gate_up[0].n;
  Deltas deltas = changes.of_gates(starts, pairs.tokens, experts.first, experts.num, gathered, size,
                                   gates_size);
  multiply_experts(starts, experts.num, experts.gate_up, gathered, 2, [=](auto w, int start) {
    return Gate<T, typename decltype(w)::Numbers>{
        inner + start * inner_size,    w, experts.alpha, experts.beta, experts.limit,
        deltas.from(start, gates_size)};
  });
  multiply_experts(starts, experts.num, experts.down, inner, 1, [=](auto w, int start) {
    return Store<typename decltype(w)::Numbers>{outputs + start * size, w};
  });
  changes.add_to_downs(starts, pairs.tokens, experts.first, experts.num, inner, inner_size, size,
                       outputs);
  each_row(num_tokens, size, [=](size_t at) {
    int first = at / size * num_chosen;
    for (int j = first; j < first + num_chosen; j++) {
      if (pairs.places[j] < begin || pairs.places[j] >= end) continue;
      f32x16 weight = spread(weights[j] * scale);
      const float* part = outputs + pairs.places[j] * size;
      for (size_t i = 0; i < size; i += LANES)
        store(out + at + i, fma(weight, load(part + i), load(out + at + i)));
    }
  });
}
