// Several decoding steps in one call: the tokens that a step samples are the inputs of the next.
// See kernels/cpu/decode.py for the arguments.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct RandomRows;

extern "C" void shoal_sample(const float* logits, const float* adjusted, int num_rows, int n,
                             int num_computed, const RandomRows* random, int64_t* tokens);

// The blocks of R rows in one group of layers.
struct DecodeGroup {
  int64_t* slot_mapping;  // [R]
  const int64_t* tables;  // [R, table_stride]
};

// R rows. A step updates the same arrays that the programs and `random` read.
struct DecodeRows {
  int32_t num_rows, block_size;
  int32_t* ids;                   // [R]: last known token
  int64_t *positions, *num_keys;  // [R]: positions of rotations; keys with the token's own
  const DecodeGroup* groups;      // [num_groups]
  int32_t num_groups, table_stride, num_random;
  int64_t* random_positions;   // [num_random]
  const int64_t* rooms;        // [R]: tokens that may follow
  const uint8_t* ignores_eos;  // [R]
  int32_t num_eos, vocab_size;
  const int64_t* eos_ids;  // [num_eos]
  const float* logits;     // [R, vocab_size]
  const RandomRows* random;
  int64_t *state_positions, *num_kept, *num_seen;  // [R] of states, or null: see delta.h

  // True if a row ends with `tokens` [R], sampled by step number `step`.
  bool any_ends(const int64_t* tokens, int step) const {
    for (int r = 0; r < num_rows; r++) {
      if (tokens[r] < 0 || step + 1 == rooms[r]) return true;
      for (int i = 0; i < num_eos && !ignores_eos[r]; i++)
        if (tokens[r] == eos_ids[i]) return true;
    }
    return false;
  }

  void go_on(const int64_t* tokens) {
    for (int r = 0; r < num_rows; r++) {
      int64_t index = num_keys[r]++, place = (int64_t)r * table_stride + index / block_size;
      ids[r] = (int32_t)tokens[r];
      positions[r]++;
      for (int g = 0; g < num_groups; g++)
        groups[g].slot_mapping[r] = groups[g].tables[place] * block_size + index % block_size;
    }
    for (int i = 0; i < num_random; i++) random_positions[i]++;
    if (!state_positions) return;
    for (int r = 0; r < num_rows; r++) {
      state_positions[r] += num_kept[r] + 1 - num_seen[r];
      num_kept[r] = num_seen[r] = 0;
    }
  }
};

// Calls compute(), which writes the logits of all rows, and samples from them, up to `num_steps`
// times or until a row ends. Returns the number of steps; the samples are in `tokens` [num_steps,
// R].
template <class Compute>
int decode(DecodeRows& rows, int num_steps, int64_t* tokens, Compute compute) {
  for (int step = 0;; tokens += rows.num_rows) {
    compute();
    shoal_sample(rows.logits, rows.logits, rows.num_rows, rows.vocab_size, rows.vocab_size,
                 rows.random, tokens);
    bool is_last = rows.any_ends(tokens, step);
    if (++step == num_steps || is_last) return step;
    rows.go_on(tokens);
  }
}
