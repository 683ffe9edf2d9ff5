// Layout of the KV cache, in the model's type or quantized to eight bits.
#pragma once

#include "words.h"

constexpr int MAX_HEAD_DIM = 512;  // also in kernels/cpu/operators.py

// Element type of the KV caches: the model's, or quantized values.
enum Cached : int32_t { NUMBERS, INT8_CODES, FP8_CODES };

// The distance of two blocks of a layer, in elements of its entries and of its scales.
struct BlockStrides {
  int64_t entries, scales;
};

// The quantized value of the largest element.
template <class W>
constexpr float HIGHEST_CODE = 127;
template <>
inline constexpr float HIGHEST_CODE<fp8> = 448;

// Elements divided by their scale → quantized values, rounded to nearest.
#ifdef __AVX512F__
INLINE void store_codes(int8_t* p, f32x16 x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
INLINE __m256i halves_of(f32x16 x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
INLINE void store_codes(int8_t* p, f32x16 x) {
  __m256i turns = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  __m256i words = _mm256_permute4x64_epi64(turns, 0xD8);
  __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
INLINE __m256i halves_of(f32x16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm256_set_m128i(_mm256_cvtps_ph(x.high, mode), _mm256_cvtps_ph(x.low, mode));
}
#endif

INLINE f32x16 magnitude(f32x16 x) { return max(x, sub(zero(), x)); }

// Adding and subtracting a large number of the right exponent rounds to three mantissa bits, and to
// multiples of 2⁻⁹ below 2⁻⁶.
INLINE void store_codes(fp8* p, f32x16 x) {
  u32x16 bits = bits_of(max(magnitude(x), spread(1.0f / 64)));
  f32x16 power = from_bits(both(bits, spread_word(0x7F800000)));
  f32x16 large = mul(power, spread(1.5f * (1 << 20)));
  f32x16 rounded = sub(add(x, large), large);
  __m256i halves = halves_of(mul(rounded, spread(1.0f / 256)));
  __m256i sign = _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80));
  __m256i rest = _mm256_and_si256(_mm256_srli_epi16(halves, 7), _mm256_set1_epi16(0x7F));
  __m256i codes = _mm256_or_si256(sign, rest);
  __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(low, high));
}

// x [size] → quantized values; returns their scale, NaN if an element is NaN or infinite.
template <class W>
INLINE float encode(const float* x, int size, W* codes) {
  f32x16 top = zero(), bad = zero();
  for (int i = 0; i < size; i += LANES) {
    top = max(top, magnitude(load(x + i)));
    bad = fma(load(x + i), zero(), bad);
  }
  float scale = highest(top) / HIGHEST_CODE<W> + sum(bad);
  if (scale < __FLT_MIN__) scale = __FLT_MIN__;
  for (int i = 0; i < size; i += LANES) store_codes(codes + i, div(load(x + i), spread(scale)));
  return scale;
}

// Must be inlined: GCC takes a function that only prefetches for one without effects.
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// Quantized values [depth][LANES] → a tile of a packed matrix in the model's type, without
// rounding. Prefetches the tile `next`, of the same size.
template <class W>
INLINE void widen_tile(const W* codes, int depth, float* tile, const W* next) {
  for (int i = 0; i < depth; i += 4) {
    prefetch(next + i * LANES);
#pragma GCC unroll 4
    for (int j = i; j < i + 4; j++) store(tile + j * LANES, load_wide(codes + j * LANES));
  }
}
template <class W>
INLINE void widen_tile(const W* codes, int depth, bf16* tile, const W* next) {
  for (int i = 0; i < depth; i += 4) {
    prefetch(next + i * LANES);
#pragma GCC unroll 2
    for (int j = i; j < i + 4; j += 2) {
      u32x16 even = bits_of(load_wide(codes + j * LANES));
      u32x16 odd = bits_of(load_wide(codes + (j + 1) * LANES));
      store((uint32_t*)(tile + j * LANES), either(shift_right(even, 16), odd));
    }
  }
}

// The KV cache of one layer, in blocks [2, num_kv_heads, block_size / 16, 16 · head_dim] at
// multiples of a stride. Sixteen keys are a tile of a packed matrix, multiplied with queries; the
// values of sixteen positions are head_dim / 16 tiles, multiplied with softmax weights. W is the
// model's type or a quantized type. Quantized tiles are not in pairs but [k][LANES], with scales
// [2, num_kv_heads, block_size] for each block.
template <class W>
struct Cache {
  W* blocks;
  float* scales;
  BlockStrides strides;
  int block_size, num_kv_heads, head_dim;

  static constexpr bool HAS_CODES = sizeof(W) == 1;

  size_t tile_size() const { return (size_t)LANES * head_dim; }
  // A block has the planes of all keys first, then the planes of all values, one per head.
  W* tile(int64_t block, int plane, int tile) const {
    return blocks + block * strides.entries + place(plane, tile) * head_dim;
  }
  float* tile_scales(int64_t block, int plane, int tile) const {
    return scales + block * strides.scales + place(plane, tile);
  }
  size_t place(int plane, int tile) const { return (size_t)plane * block_size + tile * LANES; }

  // Writes key and value [head_dim] to kv_slot = block · block_size + offset. `is_last`: the next
  // slot is unwritten; its half of a bf16 pair is zeroed, because NaN times a weight of 0 is NaN.
  void write(int64_t kv_slot, int head, const float* key, const float* value, bool is_last) const {
    int64_t block = kv_slot / block_size;
    int offset = kv_slot % block_size, lane = offset % LANES, index = offset / LANES;
    int key_plane = head, value_plane = num_kv_heads + head;
    W* keys = tile(block, key_plane, index);
    W* values = tile(block, value_plane, index);
    if constexpr (HAS_CODES) {
      W codes[MAX_HEAD_DIM];
      tile_scales(block, key_plane, index)[lane] = encode(key, head_dim, codes);
      for (int i = 0; i < head_dim; i++) keys[i * LANES + lane] = codes[i];
      tile_scales(block, value_plane, index)[lane] = encode(value, head_dim, codes);
      for (int i = 0; i < head_dim; i += LANES)
        memcpy(values + (i + lane) * LANES, codes + i, LANES);
    } else {
      for (int i = 0; i < head_dim; i++)
        narrow(key[i], keys + (i / DEPTH<W> * LANES + lane) * DEPTH<W> + i % DEPTH<W>);
      values += lane / DEPTH<W> * LANES * DEPTH<W> + lane % DEPTH<W>;
      bool fills = is_last && lane % DEPTH<W> + 1 < DEPTH<W>;
      for (int i = 0; i < head_dim; i++) {
        W* at = values + i / LANES * LANES * LANES + i % LANES * DEPTH<W>;
        narrow(value[i], at);
        if (fills) narrow(0.0f, at + 1);
      }
    }
  }
};
