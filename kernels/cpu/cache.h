// Where keys and values lie, as numbers of the model's type or as codes of eight bits.
#pragma once

#include "words.h"

constexpr int MAX_HEAD_DIM = 256;

// The code that the largest number of a key or value gets.
template <class W>
constexpr float HIGHEST_CODE = 127;
template <>
constexpr float HIGHEST_CODE<fp8> = 448;

// Numbers of a key or value over its scale → their codes, rounded to the nearest.
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

// A large number of the right exponent, added and taken away again, rounds to three bits of
// mantissa, and to multiples of 2⁻⁹ below 2⁻⁶.
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

// x [size] → codes; returns their scale, which is NaN if a number is NaN or infinite.
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

// Asks the memory for what is used later. Must be inlined: GCC takes a function that only does this
// for one that does nothing.
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// Codes of sixteen columns, one step along the summed dimension after the other → a tile of a
// packed matrix in the model's type, in which they are exact. Asks the memory for `next`, as many
// codes.
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

// The KV cache of one layer: block by block [2, num_kv_heads, block_size / 16, 16 · head_dim].
// Sixteen keys are a tile of a packed matrix that queries are multiplied with; the values of
// sixteen positions are head_dim / 16 such tiles, that the weights of attention are multiplied
// with. W is the model's type, or one of codes: these stand column by column for each step along
// the summed dimension, and have scales [2, num_kv_heads, block_size] for each block.
template <class W>
struct Cache {
  W* blocks;
  float* scales;
  int block_size, num_kv_heads, head_dim;

  static constexpr bool HAS_CODES = sizeof(W) == 1;

  size_t tile_size() const { return (size_t)LANES * head_dim; }
  // Of a block's planes those of keys stand before those of values, head by head.
  W* tile(int64_t block, int plane, int tile) const {
    return blocks + place(block, plane, tile) * head_dim;
  }
  float* tile_scales(int64_t block, int plane, int tile) const {
    return scales + place(block, plane, tile);
  }
  size_t place(int64_t block, int plane, int tile) const {
    return (block * 2 * num_kv_heads + plane) * block_size + tile * LANES;
  }

  // key and value [head_dim] go to kv_slot = block · block_size + offset. `is_last`: what follows
  // holds nothing yet, and its partner in a pair must not be NaN when it is multiplied by 0.
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
