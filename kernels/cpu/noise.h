// Gumbel noise of random bits: Philox4x32-10 as in kernels/random_bits/reference.py, bit for bit,
// and noise as in kernels/sample/gumbel.py.
#pragma once

#include "words.h"

// Inputs of the random bits that a row's tokens share.
struct BitKey {
  uint64_t seed;
  uint32_t position, choice, purpose;
};

// Random bits of eight token ids. Ids and results are in the lower words of 64-bit lanes; the upper
// words may hold anything.
INLINE u32x16 half_random_bits(const BitKey& key, u32x16 ids) {
  const u32x16 times0 = spread_word(0xD2511F53), times1 = spread_word(0xCD9E8D57);
  u32x16 c0 = ids, c1 = spread_word(key.position), c2 = spread_word(key.choice);
  u32x16 c3 = spread_word(key.purpose);
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
#pragma GCC unroll 10
  for (int i = 0; i < 10; i++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    u32x16 product0 = product_low(c0, times0), product1 = product_low(c2, times1);
    c0 = differ(differ(upper(product1), c1), spread_word(k0));
    c2 = differ(differ(upper(product0), c3), spread_word(k1));
    c1 = product1;
    c3 = product0;
  }
  return c0;
}

// Random bits of sixteen token ids.
INLINE u32x16 random_bits(const BitKey& key, u32x16 ids) {
  return pair_up(half_random_bits(key, ids), half_random_bits(key, upper(ids)));
}

// Standard Gumbel noise of a uniform from the upper 24 of 32 bits; zero counts as ½.
INLINE f32x16 gumbel(u32x16 key) {
  f32x16 uniform = mul(max(to_float(shift_right(key, 8)), spread(0.5f)), spread(0x1p-24f));
  return sub(zero(), log(sub(zero(), log(uniform))));
}
