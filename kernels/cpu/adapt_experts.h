// Adapters of routed experts: changes of their products, and of their router.
//
// Tokens are ordered by adapter before they are sorted by expert, so that the rows of an expert
// with one adapter are adjacent.
#pragma once

#include "adapt.h"

inline Scratch<int32_t> changed_numbers;
inline Scratch<float> changed_gates;  // [pairs, outputs of gates and ups]
inline Scratch<uint8_t> changed_marks;
template <class T>
inline Scratch<T> router_rows;  // [tokens, inputs of the router]

// `op` is null without an adapter in the step. Its sites: the router, then gates and downs of each
// expert in turn.
template <class T>
struct ExpertChanges {
  const Adapt* op;
  int num_tokens;
  int32_t* order = nullptr;     // [num_tokens] or null
  int32_t* adapters = nullptr;  // [num_tokens]: index or −1
  int32_t* numbers = nullptr;   // [num_pairs]: 0, 1, …

  ExpertChanges(const Adapt* given, int num_tokens, int num_pairs)
      : op(given && given->rows->num_segments ? given : nullptr), num_tokens(num_tokens) {
    if (!op) return;
    order = changed_numbers.of(2 * (size_t)num_tokens + num_pairs);
    adapters = order + num_tokens, numbers = adapters + num_tokens;
    for (int i = 0; i < num_pairs; i++) numbers[i] = i;
    for (int t = 0; t < num_tokens; t++) adapters[t] = -1;
    int num = 0;
    for (int i = 0; i < op->rows->num_segments; i++) {
      const Segment& segment = op->rows->segments[i];
      for (int j = segment.start; j < segment.start + segment.num; j++) {
        order[num++] = op->rows->tokens[j];
        adapters[op->rows->tokens[j]] = segment.adapter;
      }
    }
    for (int i = 0; i < num_tokens; i++)
      if (adapters[i] < 0) order[num++] = i;
  }

  // Adds to the router's logits [num_tokens, num_experts] for rows x [num_tokens, k].
  void add_to_logits(const float* x, int k, int num_experts, float* logits) const {
    if (!op) return;
    bool has_some = false;
    for (int i = 0; i < op->rows->num_segments; i++)
      has_some |= op->pieces(op->rows->segments[i]).num > 0;
    if (!has_some) return;
    T* narrow = router_rows<T>.of((size_t)num_tokens * k);
    narrow_rows(x, num_tokens, k, narrow);
    adapt_rows(Adapt{op->rows, op->site, num_experts}, narrow, k, 1, true, logits);
  }

  // The rows of each expert with one adapter that changes its site number `part`. The rows of
  // expert first + e are starts[e] … starts[e + 1] − 1, their tokens `tokens`, their inputs rows
  // [·, k].
  int find_runs(const int32_t* starts, const int32_t* tokens, int first, int num_experts, int part,
                const T* rows, int k, AdaptedRun<T>* runs) const {
    int num = 0;
    for (int e = 0; e < num_experts; e++)
      for (int start = starts[e], end; start < starts[e + 1]; start = end) {
        int adapter = adapters[tokens[start]];
        for (end = start + 1; end < starts[e + 1] && adapters[tokens[end]] == adapter;) end++;
        if (adapter < 0) continue;
        const Pieces& pieces = op->rows->adapters[adapter][op->site + 1 + 2 * (first + e) + part];
        if (pieces.num)
          runs[num++] = {rows + (size_t)start * k, end - start, numbers + start, &pieces};
      }
    return num;
  }

  // The deltas of gates and ups [pairs, size] of rows [pairs, k].
  Deltas of_gates(const int32_t* starts, const int32_t* tokens, int first, int num_experts,
                  const T* rows, int k, int size) const {
    if (!op) return {};
    int num_pairs = starts[num_experts];
    AdaptedRun<T>* runs = adapted_runs<T>.of(num_pairs);
    int num = find_runs(starts, tokens, first, num_experts, 0, rows, k, runs);
    if (!num) return {};
    uint8_t* marks = changed_marks.of(num_pairs);
    memset(marks, 0, num_pairs);
    for (int i = 0; i < num; i++) memset(marks + *runs[i].tokens, 1, runs[i].num);
    float* deltas = changed_gates.of((size_t)num_pairs * size);
    adapt_runs(runs, num, size, 1, false, deltas);
    return {deltas, marks};
  }

  // Adds to the outputs [pairs, size] of rows [pairs, k].
  void add_to_downs(const int32_t* starts, const int32_t* tokens, int first, int num_experts,
                    const T* rows, int k, int size, float* outputs) const {
    if (!op) return;
    AdaptedRun<T>* runs = adapted_runs<T>.of(starts[num_experts]);
    int num = find_runs(starts, tokens, first, num_experts, 1, rows, k, runs);
    adapt_runs(runs, num, size, 1, true, outputs);
  }
};
