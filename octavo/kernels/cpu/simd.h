// Vectors of 16 lanes and what the two activation types (f32, bf16) need of them.
//
// Every function here is elementwise or reduces in one fixed order, so that a row's result never
// depends on its neighbours. Next file: pool.h.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace oct {

typedef __m512 V16;  // 16 f32 lanes

static inline __mmask16 tail_mask(long count) {
  return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

// Lanes are added in a fixed tree.
static inline float sum_lanes(V16 v) { return _mm512_reduce_add_ps(v); }
static inline float max_lanes(V16 v) { return _mm512_reduce_max_ps(v); }

// exp(x) to about 1 ulp, a Taylor series on |r| <= ln(2)/2; 0 below -87.3, infinity above 88.7.
static inline V16 exp16(V16 x) {
  const V16 low = _mm512_set1_ps(-87.33654f), high = _mm512_set1_ps(88.73f);
  const __mmask16 under = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);
  x = _mm512_min_ps(high, x);  // operand order keeps NaN
  const V16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  V16 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  V16 p = _mm512_set1_ps(1.9841270e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3888889e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3333333e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), under, _mm512_setzero_ps());
}

// exp(x) for x <= 0, and 0 for -inf, to 1 ulp or, `rough`, to 3e-6: enough for weights in bf16.
template <bool rough>
static inline V16 exp_below16(V16 x) {
  const __mmask16 in_range = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
  const V16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  V16 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  V16 p;
  if (rough) {
    p = _mm512_set1_ps(8.3333333e-3f);
  } else {
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.9841270e-4f), r, _mm512_set1_ps(1.3888889e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3333333e-3f));
  }
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(in_range, p, n);
}

// x / (1 + exp(-t)). The quotient is a reciprocal refined once, to about 1 ulp: a division costs as
// much as all the rest. Below -80, where the result vanishes, the exponential is held finite.
static inline V16 gate16(V16 x, V16 t) {
  const V16 one = _mm512_set1_ps(1.0f);
  const V16 minus_t = _mm512_sub_ps(_mm512_setzero_ps(), t);
  const V16 d = _mm512_add_ps(one, exp16(_mm512_min_ps(_mm512_set1_ps(80.0f), minus_t)));
  const V16 r = _mm512_rcp14_ps(d);
  const V16 refined = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, one), r);
  return _mm512_mul_ps(x, refined);
}

static inline V16 silu16(V16 x) { return gate16(x, x); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), where u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline V16 gelu16(V16 x) {
  const V16 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.07135481627f),
                                    _mm512_set1_ps(1.5957691216f));
  return gate16(x, _mm512_mul_ps(x, cubic));
}

// tanh by exp(-2|x|); for soft caps on attention scores.
static inline V16 tanh16(V16 x) {
  const V16 one = _mm512_set1_ps(1.0f);
  const V16 e = exp16(_mm512_mul_ps(_mm512_set1_ps(-2.0f), _mm512_abs_ps(x)));
  const V16 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(t), sign));
}

// f32 activations: one weight a lane and step.
struct F32 {
  typedef float T;
  static constexpr int kStep = 1;  // values of K that one mad takes
  static inline V16 load(const T* p) { return _mm512_loadu_ps(p); }
  static inline V16 load(const T* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
  static inline void store(T* p, V16 v) { _mm512_storeu_ps(p, v); }
  static inline void store(T* p, V16 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }
  static inline V16 round(V16 v) { return v; }
  static inline V16 broadcast(const T* p) { return _mm512_set1_ps(*p); }
  static inline V16 mad(V16 sum, V16 a, V16 b) { return _mm512_fmadd_ps(a, b, sum); }
  static inline V16 raw(const void* p) { return _mm512_loadu_ps(p); }
};

#ifdef __AVX512BF16__
// bf16 activations: pairs of values along K, f32 sums.
struct BF16 {
  typedef uint16_t T;
  static constexpr int kStep = 2;
  static inline V16 widen(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  static inline __m256i narrow(V16 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
  static inline V16 load(const T* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
  static inline V16 load(const T* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
  static inline void store(T* p, V16 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
  static inline void store(T* p, V16 v, __mmask16 m) {
    _mm256_mask_storeu_epi16(p, m, narrow(v));
  }
  static inline V16 round(V16 v) { return widen(narrow(v)); }
  static inline V16 broadcast(const T* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static inline V16 mad(V16 sum, V16 a, V16 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static inline V16 raw(const void* p) { return _mm512_loadu_ps(p); }
};
#endif

#ifdef __AVX512VNNI__
// Weights of 8 or 4 bits, four along K a step; activations are x / scale.
struct INT8 {
  typedef int8_t T;
  static constexpr int kStep = 4;
};
#endif

}  // namespace oct
