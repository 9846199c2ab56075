// Keys and values in 8-bit floats: e4m3 (OCP: no infinity, 448 at most) and e5m2.
//
// Narrowing rounds to nearest, ties to even; what is too large becomes the largest number and NaN
// stays NaN. Widening looks numbers up: all of them are exact in bf16. Next file: attention.h.
#pragma once

#include "simd.h"

namespace oct {

enum CacheKind { kSame, kE4M3, kE5M2 };

// 16 floats -> 16 bytes. `mantissa` bits and the exponent's `bias` tell the two formats apart.
template <int mantissa, int bias>
static inline __m128i narrow16(V16 v, float largest) {
  constexpr int drop = 23 - mantissa;
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const V16 a = _mm512_min_ps(_mm512_abs_ps(v), _mm512_set1_ps(largest));
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, drop), _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(bits, _mm512_set1_epi32((1 << (drop - 1)) - 1));
  code = _mm512_srli_epi32(_mm512_add_epi32(code, odd), drop);
  code = _mm512_sub_epi32(code, _mm512_set1_epi32((127 - bias) << mantissa));
  // Below the least normal number codes count steps of the least one.
  const float least = std::ldexp(1.0f, 1 - bias), step = std::ldexp(1.0f, bias - 1 + mantissa);
  const __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(least), _CMP_LT_OQ);
  code = _mm512_mask_cvtps_epi32(code, small, _mm512_mul_ps(a, _mm512_set1_ps(step)));
  code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 24),
                                        _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

// x / scale -> bytes; `size` is a multiple of 16.
template <class D>
static inline void narrow_row(const typename D::T* x, uint8_t* out, int size, int kind,
                              float scale) {
  const V16 by = _mm512_set1_ps(scale);
  for (int i = 0; i < size; i += 16) {
    const V16 v = _mm512_div_ps(D::load(x + i), by);
    const __m128i bytes = kind == kE4M3 ? narrow16<3, 7>(v, 448.0f) : narrow16<2, 15>(v, 57344.0f);
    _mm_storeu_si128((__m128i*)(out + i), bytes);
  }
}

// The upper halves of floats (which are bf16) of the 128 codes without a sign.
struct WidenTable {
  __m512i part[4];
  explicit WidenTable(int kind) {
    const int mantissa = kind == kE4M3 ? 3 : 2, bias = kind == kE4M3 ? 7 : 15;
    uint16_t words[128];
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> mantissa, rest = code & ((1 << mantissa) - 1);
      float value = exponent
          ? std::ldexp(1.0f + (float)rest / (1 << mantissa), exponent - bias)
          : std::ldexp((float)rest, 1 - bias - mantissa);
      if (kind == kE4M3 && code == 127) value = NAN;
      if (kind == kE5M2 && code >= 124) value = code == 124 ? INFINITY : NAN;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      words[code] = (uint16_t)(bits >> 16);
    }
    std::memcpy(part, words, sizeof(words));
  }
};

static inline __m512i widen32(__m256i bytes, const WidenTable& t) {
  const __m512i code = _mm512_cvtepu8_epi16(bytes);
  const __m512i low = _mm512_permutex2var_epi16(t.part[0], code, t.part[1]);
  const __m512i high = _mm512_permutex2var_epi16(t.part[2], code, t.part[3]);
  const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
  return _mm512_or_si512(_mm512_mask_blend_epi16(upper, low, high), sign);
}

// `count` bytes, a multiple of 16, to numbers of D; may write 32 at a time.
template <class D>
static inline void widen_row(const char* in, typename D::T* out, int count, const WidenTable& t) {
  for (int i = 0; i < count; i += 32) {
    const bool whole = count - i >= 32;
    const __m256i bytes = whole ? _mm256_loadu_si256((const __m256i*)(in + i))
                                : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(in + i)));
    const __m512i words = widen32(bytes, t);
    if (D::kStep == 2) {
      _mm512_storeu_si512((char*)out + i * 2, words);
      continue;
    }
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
    _mm512_storeu_si512((char*)out + i * 4, _mm512_slli_epi32(first, 16));
    _mm512_storeu_si512((char*)out + i * 4 + 64, _mm512_slli_epi32(second, 16));
  }
}

}  // namespace oct
