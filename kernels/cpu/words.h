// Vectors of sixteen 32-bit words, comparisons of vectors, and the logarithm, with the same
// functions on AVX-512 and AVX2.
#pragma once

#include "simd.h"

#ifdef __AVX512F__

typedef __m512i u32x16;

INLINE u32x16 spread_word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE u32x16 count_up() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
INLINE void store(uint32_t* p, u32x16 x) { _mm512_storeu_si512(p, x); }
INLINE u32x16 bits_of(f32x16 x) { return _mm512_castps_si512(x); }
INLINE f32x16 from_bits(u32x16 x) { return _mm512_castsi512_ps(x); }
INLINE f32x16 to_float(u32x16 x) { return _mm512_cvtepi32_ps(x); }  // of int32
INLINE u32x16 plus(u32x16 a, u32x16 b) { return _mm512_add_epi32(a, b); }
INLINE u32x16 minus(u32x16 a, u32x16 b) { return _mm512_sub_epi32(a, b); }
INLINE u32x16 both(u32x16 a, u32x16 b) { return _mm512_and_si512(a, b); }
INLINE u32x16 either(u32x16 a, u32x16 b) { return _mm512_or_si512(a, b); }
INLINE u32x16 differ(u32x16 a, u32x16 b) { return _mm512_xor_si512(a, b); }
INLINE u32x16 shift_right(u32x16 a, int by) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(by)); }
INLINE u32x16 shift_signed(u32x16 a, int by) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(by)); }
// Of pairs of words (64-bit lanes): product of the lower words, upper word moved down, and pairs of
// the lower words of two vectors.
INLINE u32x16 product_low(u32x16 a, u32x16 b) { return _mm512_mul_epu32(a, b); }
INLINE u32x16 upper(u32x16 a) { return _mm512_srli_epi64(a, 32); }
INLINE u32x16 pair_up(u32x16 a, u32x16 b) {
  return _mm512_mask_blend_epi32(0xAAAA, a, _mm512_slli_epi64(b, 32));
}
// Masks have one bit per lane, from the lowest bit on.
INLINE uint32_t equal(u32x16 a, u32x16 b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE uint32_t equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE uint32_t at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t above(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// a where x ≥ least, else b.
INLINE f32x16 pick(f32x16 x, f32x16 least, f32x16 a, f32x16 b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), b, a);
}

#else  // AVX2 with FMA

struct u32x16 {
  __m256i low, high;
};

#define BOTH_WORDS(op) (u32x16{op(a.low, b.low), op(a.high, b.high)})
#define BOTH_BY(op, by) (u32x16{op(a.low, by), op(a.high, by)})

INLINE u32x16 spread_word(uint32_t x) {
  return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)};
}
INLINE u32x16 count_up() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
INLINE void store(uint32_t* p, u32x16 x) {
  _mm256_storeu_si256((__m256i*)p, x.low);
  _mm256_storeu_si256((__m256i*)(p + 8), x.high);
}
INLINE u32x16 bits_of(f32x16 x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
INLINE f32x16 from_bits(u32x16 x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
INLINE f32x16 to_float(u32x16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
INLINE u32x16 plus(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_add_epi32); }
INLINE u32x16 minus(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_sub_epi32); }
INLINE u32x16 both(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_and_si256); }
INLINE u32x16 either(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_or_si256); }
INLINE u32x16 differ(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_xor_si256); }
INLINE u32x16 shift_right(u32x16 a, int by) {
  return BOTH_BY(_mm256_srl_epi32, _mm_cvtsi32_si128(by));
}
INLINE u32x16 shift_signed(u32x16 a, int by) {
  return BOTH_BY(_mm256_sra_epi32, _mm_cvtsi32_si128(by));
}
INLINE u32x16 product_low(u32x16 a, u32x16 b) { return BOTH_WORDS(_mm256_mul_epu32); }
INLINE u32x16 upper(u32x16 a) { return BOTH_BY(_mm256_srli_epi64, 32); }
INLINE __m256i pair_up_half(__m256i a, __m256i b) {
  return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
}
INLINE u32x16 pair_up(u32x16 a, u32x16 b) { return BOTH_WORDS(pair_up_half); }
INLINE uint32_t mask_of(__m256 low, __m256 high) {
  return (uint32_t)_mm256_movemask_ps(low) | (uint32_t)_mm256_movemask_ps(high) << 8;
}
#define COMPARED(how) mask_of(_mm256_cmp_ps(a.low, b.low, how), _mm256_cmp_ps(a.high, b.high, how))
INLINE uint32_t equal(u32x16 a, u32x16 b) {
  return mask_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.low, b.low)),
                 _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.high, b.high)));
}
INLINE uint32_t equal(f32x16 a, f32x16 b) { return COMPARED(_CMP_EQ_OQ); }
INLINE uint32_t at_least(f32x16 a, f32x16 b) { return COMPARED(_CMP_GE_OQ); }
INLINE uint32_t above(f32x16 a, f32x16 b) { return COMPARED(_CMP_GT_OQ); }
INLINE __m256 pick_half(__m256 x, __m256 least, __m256 a, __m256 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, least, _CMP_GE_OQ));
}
INLINE f32x16 pick(f32x16 x, f32x16 least, f32x16 a, f32x16 b) {
  return {pick_half(x.low, least.low, a.low, b.low), pick_half(x.high, least.high, a.high, b.high)};
}

#endif

// Natural logarithm of positive normal numbers: log(2^e · (1 + f)) with 1 + f between √½ and √2.
// The polynomial's relative error is 10⁻⁹, the total error within 2 ulp of float32.
INLINE f32x16 log(f32x16 x) {
  const u32x16 root = spread_word(0x3F3504F3);  // the bits of √½
  u32x16 from_root = minus(bits_of(x), root);
  f32x16 e = to_float(shift_signed(from_root, 23));
  f32x16 f = sub(from_bits(plus(both(from_root, spread_word(0x7FFFFF)), root)), spread(1.0f));
  f32x16 p = spread(0.0674660131f);
  p = fma(p, f, spread(-0.116756409f));
  p = fma(p, f, spread(0.118881747f));
  p = fma(p, f, spread(-0.124055915f));
  p = fma(p, f, spread(0.142195508f));
  p = fma(p, f, spread(-0.166679963f));
  p = fma(p, f, spread(0.200021192f));
  p = fma(p, f, spread(-0.250000089f));
  p = fma(p, f, spread(0.333333135f));
  f32x16 square = mul(f, f);
  f32x16 rest = fma(e, spread(-2.12194440e-4f), mul(mul(p, f), square));
  rest = fma(square, spread(-0.5f), rest);
  return fma(e, spread(0.693359375f), add(f, rest));
}

INLINE float log_of(float x) { return highest(log(spread(x))); }
