// Vectors of sixteen float32, on AVX-512 or AVX2, and the element types of weights, activations and
// the KV cache. The kernels are written with these functions and few further intrinsics.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int LANES = 16;

// As in <type_traits>, which is of the C++ library: the compiler of ziglang comes without.
template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;
template <class A>
constexpr bool IS_POINTER = false;
template <class A>
constexpr bool IS_POINTER<A*> = true;
template <bool B>
struct Flag {
  static constexpr bool value = B;
};

#ifdef __AVX512F__

typedef __m512 f32x16;

INLINE f32x16 zero() { return _mm512_setzero_ps(); }
INLINE f32x16 spread(float x) { return _mm512_set1_ps(x); }
INLINE f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x); }
INLINE f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
INLINE f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
INLINE f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
INLINE f32x16 div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
INLINE f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
INLINE f32x16 round(f32x16 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE float sum(f32x16 a) { return _mm512_reduce_add_ps(a); }
INLINE float highest(f32x16 a) { return _mm512_reduce_max_ps(a); }
// 2^n · a; the lanes of n are integers.
INLINE f32x16 scale2(f32x16 a, f32x16 n) { return _mm512_scalef_ps(a, n); }
// The first `num` lanes of a, the other lanes of b.
INLINE f32x16 first(int num, f32x16 a, f32x16 b) {
  return _mm512_mask_blend_ps((__mmask16)((1u << num) - 1), b, a);
}
INLINE f32x16 load_some(const float* p, int num) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << num) - 1), p);
}
INLINE void store_some(float* p, f32x16 x, int num) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << num) - 1), x);
}

#else  // AVX2 with FMA

struct f32x16 {
  __m256 low, high;
};

#define BOTH(op) (f32x16{op(a.low, b.low), op(a.high, b.high)})

INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE f32x16 spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
INLINE f32x16 add(f32x16 a, f32x16 b) { return BOTH(_mm256_add_ps); }
INLINE f32x16 sub(f32x16 a, f32x16 b) { return BOTH(_mm256_sub_ps); }
INLINE f32x16 mul(f32x16 a, f32x16 b) { return BOTH(_mm256_mul_ps); }
INLINE f32x16 div(f32x16 a, f32x16 b) { return BOTH(_mm256_div_ps); }
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE f32x16 max(f32x16 a, f32x16 b) { return BOTH(_mm256_max_ps); }
INLINE f32x16 min(f32x16 a, f32x16 b) { return BOTH(_mm256_min_ps); }
INLINE f32x16 round(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
INLINE float sum(f32x16 a) {
  __m256 both = _mm256_add_ps(a.low, a.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float highest(f32x16 a) {
  __m256 both = _mm256_max_ps(a.low, a.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE __m256 scale2_half(__m256 a, __m256 n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
INLINE f32x16 scale2(f32x16 a, f32x16 n) {
  return {scale2_half(a.low, n.low), scale2_half(a.high, n.high)};
}
INLINE f32x16 first(int num, f32x16 a, f32x16 b) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num), index));
  __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num - 8), index));
  return {_mm256_blendv_ps(b.low, a.low, low), _mm256_blendv_ps(b.high, a.high, high)};
}
INLINE f32x16 load_some(const float* p, int num) {
  float copy[LANES] = {};
  memcpy(copy, p, num * sizeof(float));
  return load(copy);
}
INLINE void store_some(float* p, f32x16 x, int num) {
  float copy[LANES];
  store(copy, x);
  memcpy(p, copy, num * sizeof(float));
}

#endif

// e^x; 0 below −87, e^88 above 88, e^−87 for NaN. Cody-Waite reduction and a polynomial of degree 6
// (Taylor terms up to 1/720): within 2 ulp of float32.
INLINE f32x16 exp(f32x16 x) {
  const f32x16 lowest = spread(-87.0f);
  f32x16 clamped = min(max(x, lowest), spread(88.0f));
  f32x16 n = round(mul(clamped, spread(1.44269504f)));
  f32x16 r = fma(n, spread(-0.693359375f), clamped);
  r = fma(n, spread(2.12194440e-4f), r);
  f32x16 p = spread(1.0f / 720);
  p = fma(p, r, spread(1.0f / 120));
  p = fma(p, r, spread(1.0f / 24));
  p = fma(p, r, spread(1.0f / 6));
  p = fma(p, r, spread(0.5f));
  p = fma(p, r, spread(1.0f));
  p = fma(p, r, spread(1.0f));
  f32x16 y = scale2(p, n);
#ifdef __AVX512F__
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ), zero());
#else
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, lowest.low, _CMP_LT_OQ), y.low),
          _mm256_andnot_ps(_mm256_cmp_ps(x.high, lowest.high, _CMP_LT_OQ), y.high)};
#endif
}

// Absolute error: a few ulp of 1.
INLINE f32x16 tanh(f32x16 x) {
  return sub(spread(1.0f), div(spread(2.0f), add(spread(1.0f), exp(add(x, x)))));
}

INLINE f32x16 sigmoid(f32x16 x) {
  return div(spread(1.0f), add(spread(1.0f), exp(sub(zero(), x))));
}
// x · Φ(x), by the rational approximation of erf in Eigen (its coefficients).
INLINE f32x16 gelu(f32x16 x) {
  f32x16 y = mul(x, spread(0.70710678f));
  y = min(max(y, spread(-4.0f)), spread(4.0f));
  f32x16 square = mul(y, y);
  f32x16 p = spread(-2.72614225801306e-10f);
  p = fma(p, square, spread(2.77068142495902e-08f));
  p = fma(p, square, spread(-2.10102402082508e-06f));
  p = fma(p, square, spread(-5.69250639462346e-05f));
  p = fma(p, square, spread(-7.34990630326855e-04f));
  p = fma(p, square, spread(-2.95459980854025e-03f));
  p = fma(p, square, spread(-1.60960333262415e-02f));
  f32x16 q = spread(-1.45660718464996e-05f);
  q = fma(q, square, spread(-2.13374055278905e-04f));
  q = fma(q, square, spread(-1.68282697438203e-03f));
  q = fma(q, square, spread(-7.37332916720468e-03f));
  q = fma(q, square, spread(-1.42647390514189e-02f));
  f32x16 half = mul(x, spread(0.5f));
  return fma(half, div(mul(y, p), q), half);
}
// y, or NaN where x is NaN, which exp takes for a number.
INLINE f32x16 or_nan(f32x16 x, f32x16 y) {
  f32x16 finite = min(spread(1e30f), max(spread(-1e30f), x));  // NaN as second operand stays
  return fma(finite, zero(), y);
}
INLINE f32x16 silu(f32x16 x) { return div(x, add(spread(1.0f), exp(sub(zero(), x)))); }

struct bf16 {
  uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
INLINE void narrow(float x, float* to) { *to = x; }
// Rounds to nearest, ties to even; NaN stays NaN.
INLINE void narrow(float x, bf16* to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bool is_nan = x != x;
  bits += 0x7FFF + (bits >> 16 & 1);
  to->bits = is_nan ? 0x7FC0 : (uint16_t)(bits >> 16);
}

INLINE f32x16 load_wide(const float* p) { return load(p); }
INLINE void store_narrow(float* p, f32x16 x) { store(p, x); }

#ifdef __AVX512F__
INLINE f32x16 load_wide(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#else
INLINE __m256 load_wide_half(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE f32x16 load_wide(const bf16* p) { return {load_wide_half(p), load_wide_half(p + 8)}; }
#endif

#ifdef __AVX512BF16__
INLINE void store_narrow(bf16* p, f32x16 x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
#else
INLINE void store_narrow(bf16* p, f32x16 x) {
  float wide[LANES];
  store(wide, x);
  for (int i = 0; i < LANES; i++) narrow(wide[i], p + i);
}
#endif

// Sixteen int8 values of a weight, exact in float32 and bf16.
#ifdef __AVX512F__
INLINE f32x16 load_wide(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#else
INLINE __m256 load_wide_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE f32x16 load_wide(const int8_t* p) { return {load_wide_half(p), load_wide_half(p + 8)}; }
#endif

// FP8 E4M3: sign, four bits of exponent, three of mantissa (arXiv 2209.05433).
struct fp8 {
  uint8_t bits;
};

// Sixteen values / 256, by way of FP16: a shift of the bits, also for subnormals. NaN reads as
// ± 480.
INLINE f32x16 load_small(const fp8* p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBFFF));
#ifdef __AVX512F__
  return _mm512_cvtph_ps(halves);
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}
INLINE f32x16 load_wide(const fp8* p) { return mul(load_small(p), spread(256.0f)); }

// Pairs of bf16 → the first or the second of each.
#ifdef __AVX512F__
INLINE f32x16 first_of_pairs(f32x16 pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
INLINE f32x16 second_of_pairs(f32x16 pairs) {
  __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), upper));
}
#else
INLINE __m256 first_of_pairs(__m256 pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
INLINE f32x16 first_of_pairs(f32x16 pairs) {
  return {first_of_pairs(pairs.low), first_of_pairs(pairs.high)};
}
INLINE f32x16 second_of_pairs(f32x16 pairs) {
  const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000));
  return {_mm256_and_ps(pairs.low, upper), _mm256_and_ps(pairs.high, upper)};
}
#endif

// Quantized values of sixteen columns at k and k + 1 → pairs of bf16: the upper half of a float32
// is exact.
#ifdef __AVX512F__
template <class C>
INLINE __m512i widen_pairs(const C* p) {
  __m512i even = _mm512_castps_si512(load_wide(p));
  __m512i odd = _mm512_castps_si512(load_wide(p + LANES));
  return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
}
template <class C>
INLINE void store_pairs(bf16* to, const C* p) {
  _mm512_storeu_si512(to, widen_pairs(p));
}
#endif
INLINE void store_pairs(bf16* to, f32x16 even, f32x16 odd) {
  float first[LANES], second[LANES];
  store(first, even);
  store(second, odd);
  for (int lane = 0; lane < LANES; lane++) {
    narrow(first[lane], to + 2 * lane);
    narrow(second[lane], to + 2 * lane + 1);
  }
}
#ifndef __AVX512F__
template <class C>
INLINE void store_pairs(bf16* to, const C* p) {
  store_pairs(to, load_wide(p), load_wide(p + LANES));
}
#endif

// Values of four bits, CODES_DEPTH of each of sixteen columns, in 32 words of sixteen bits: nibble
// q of word 2 · column + p is k = 2 · q + p.
constexpr int CODES_DEPTH = 8;
constexpr int CODES_BYTES = LANES * CODES_DEPTH / 2;

// Shift of k, 0 ≤ k < CODES_DEPTH, in a column's 32 bits.
INLINE int code_shift(int k) { return 16 * (k & 1) + 4 * (k >> 1); }

// Values of four-bit codes. `narrow` has the table twice: the index of the permutation has a fifth
// bit, the lowest bit of the next nibble.
struct alignas(64) CodeTable {
  float wide[16];
  bf16 narrow[32];
};

#ifdef __AVX512F__
struct Codes {
  __m512i words;

  INLINE Codes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  // Values of all columns for one k. Only the lowest four bits of an index count.
  INLINE f32x16 wide(Codes codes, int k, const CodeTable* table) {
    __m512i found = _mm512_srl_epi32(codes.words, _mm_cvtsi32_si128(code_shift(k)));
    return _mm512_permutexvar_ps(found, ::load(table->wide));
  }
};
#else
struct Codes {
  __m256i low, high;  // eight columns each

  INLINE Codes load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  // The lowest three bits of a code index a half of the table, the fourth bit selects the half.
  INLINE __m256 wide_half(__m256i words, int k, const CodeTable* table) {
    __m256i found = _mm256_srl_epi32(words, _mm_cvtsi32_si128(code_shift(k)));
    __m256 first = _mm256_permutevar8x32_ps(_mm256_load_ps(table->wide), found);
    __m256 second = _mm256_permutevar8x32_ps(_mm256_load_ps(table->wide + 8), found);
    return _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(found, 28)));
  }
  INLINE f32x16 wide(Codes codes, int k, const CodeTable* table) {
    return {wide_half(codes.low, k, table), wide_half(codes.high, k, table)};
  }
};

// The lower and the upper bytes of a narrow table, which shuffles look up.
struct ByteTable {
  __m256i lower, upper;

  INLINE ByteTable of(const CodeTable* table) {
    __m128i first = _mm_load_si128((const __m128i*)table->narrow);
    __m128i last = _mm_load_si128((const __m128i*)(table->narrow + 8));
    const __m128i byte = _mm_set1_epi16(255);
    __m128i lower = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(last, byte));
    __m128i upper = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8));
    return {_mm256_broadcastsi128_si256(lower), _mm256_broadcastsi128_si256(upper)};
  }
  // Values of eight columns at k and k + 1, for each even k, as pairs of bf16.
  INLINE void look_up(const ByteTable& bytes, __m256i words, __m256 pairs[CODES_DEPTH / 2]) {
    const __m256i odd = _mm256_set1_epi16((short)0xFF00);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      __m256i index =
          _mm256_and_si256(i ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
      __m256i lower = _mm256_shuffle_epi8(bytes.lower, index);
      __m256i upper = _mm256_shuffle_epi8(bytes.upper, index);
      pairs[i] = _mm256_castsi256_ps(_mm256_blendv_epi8(lower, _mm256_slli_epi16(upper, 8), odd));
      pairs[i + 2] =
          _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_srli_epi16(lower, 8), upper, odd));
    }
  }
};
#endif

// Values of all columns for k and k + 1, k even, as pairs of bf16.
#ifdef __AVX512F__
INLINE __m512i code_pairs(Codes codes, int k, const CodeTable* table) {
  __m512i found = _mm512_srl_epi16(codes.words, _mm_cvtsi32_si128(2 * k));
  return _mm512_permutexvar_epi16(found, _mm512_load_si512(table->narrow));
}
INLINE void store_pairs(bf16* to, Codes codes, int k, const CodeTable* table) {
  _mm512_storeu_si512(to, code_pairs(codes, k, table));
}
#else
INLINE void store_pairs(bf16* to, Codes codes, int k, const CodeTable* table) {
  store_pairs(to, Codes::wide(codes, k, table), Codes::wide(codes, k + 1, table));
}
#endif

// Elements in 32 bits of a tile: along k, of one of its sixteen columns.
template <class T>
constexpr int DEPTH = 4 / sizeof(T);

// Operands of one step of a GEMM, STEP_DEPTH elements along k: a tile's own, and those of a row of
// T that all columns share. A step has PARTS parts, so that only one part's operands take
// registers.
template <class T, class W = T>
struct Operands;

template <>
struct Operands<float> {
  static constexpr int STEP_DEPTH = 1, PARTS = 1;
  typedef f32x16 Tile;
  typedef f32x16 Shared;
  INLINE Tile tile(const float* p, int /* part */) { return load(p); }
  INLINE Shared shared(const float* p, int /* part */) { return spread(*p); }
  INLINE f32x16 dot(f32x16 sum, Tile tile, Shared shared) { return fma(tile, shared, sum); }
};

#ifdef __AVX512BF16__
template <>
struct Operands<bf16> {
  static constexpr int STEP_DEPTH = 2, PARTS = 1;
  typedef __m512bh Tile;
  typedef __m512bh Shared;
  INLINE Tile tile(const bf16* p, int /* part */) { return (__m512bh)_mm512_loadu_si512(p); }
  INLINE Shared shared(const bf16* p, int /* part */) {
    int pair;
    memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  INLINE f32x16 dot(f32x16 sum, Tile tile, Shared shared) {
    return _mm512_dpbf16_ps(sum, tile, shared);
  }
};
#else
// The first or the second of each pair.
INLINE f32x16 half_of_pairs(const bf16* p, int part) {
  f32x16 pairs = load((const float*)p);
  return part ? second_of_pairs(pairs) : first_of_pairs(pairs);
}

// Rows in float32: bf16 ones that were widened before.
template <>
struct Operands<float, bf16> : Operands<float> {
  static constexpr int STEP_DEPTH = 2, PARTS = 2;
  INLINE Tile tile(const bf16* p, int part) { return half_of_pairs(p, part); }
  INLINE Shared shared(const float* p, int part) { return spread(p[part]); }
};

template <>
struct Operands<bf16> : Operands<float> {
  static constexpr int STEP_DEPTH = 2, PARTS = 2;
  INLINE Tile tile(const bf16* p, int part) { return half_of_pairs(p, part); }
  INLINE Shared shared(const bf16* p, int part) {
    float pair;
    memcpy(&pair, p, 4);
    return part ? second_of_pairs(spread(pair)) : first_of_pairs(spread(pair));
  }
};
#endif
