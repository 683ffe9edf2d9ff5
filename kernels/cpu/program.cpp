// The functions of a program that are the same for all types of weights.

#include "program.h"

EXPORT void shoal_pack_int8(const int8_t* codes, const int64_t* order, int n, int k,
                            int8_t* tiles) {
  pack<int8_t, 1>(codes, order, n, k, tiles);
}

EXPORT void shoal_pack_int4(const uint8_t* codes, const int64_t* order, int n, int k,
                            uint8_t* tiles) {
  pack_nibbles(codes, order, n, k, tiles);
}

// True if this build quantizes rows for weights of the form.
EXPORT int shoal_can_round(int form) {
  Matrix matrix = {};
  matrix.form = form, matrix.group = 1;
  bool can = false;
  with_packed<float>(matrix, [&](auto w) { can = CAN_ROUND<typename decltype(w)::Numbers>; });
  return can;
}

EXPORT void shoal_start(int num_threads) { start_pool(num_threads); }

// Bytes of the memory that `size` ranks share; it must be zeroed.
EXPORT size_t shoal_collectives_bytes(int size) {
  return MAX_RANKS * sizeof(Arrival) + 2 * size * ROOM * sizeof(float);
}

// `num_here` of `size` ranks share the memory. The first rank of a host passes its sockets, one for
// each other host, and the first ranks of these hosts.
EXPORT void shoal_meet(void* memory, int rank, int size, int num_here, int num_wires,
                       const int* sockets, const int* first_ranks) {
  collectives = {(Arrival*)memory, (float*)((Arrival*)memory + MAX_RANKS), rank, size};
  collectives.first_rank = rank / num_here * num_here;
  collectives.num_here = num_here;
  collectives.num_wires = num_wires;
  for (int i = 0; i < num_wires; i++) collectives.wires[i] = {sockets[i], first_ranks[i], 0, 0};
}

EXPORT int shoal_gather(const float* x, size_t num, float* out) {
  gather_ranks(x, num, out);
  return collectives.failure;
}
