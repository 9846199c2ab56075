// Small work on one row: norms, rotary positions, gated activation. One rounding, at the end.
//
// Next file: narrow.h.
#pragma once

#include "products.h"

namespace oct {

// out = x / sqrt(mean(x^2) + eps) * weight, the weight of x's type or another
template <class D, class W = D>
static inline void rms_norm_row(const typename D::T* x, const typename W::T* weight,
                                typename D::T* out, int size, float eps) {
  V16 sum = _mm512_setzero_ps();
  for (int i = 0; i < size; i += 16) {
    const V16 v = D::load(x + i, tail_mask(size - i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const V16 scale = _mm512_set1_ps(1.0f / std::sqrt(sum_lanes(sum) / (float)size + eps));
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    const V16 v = _mm512_mul_ps(D::load(x + i, m), scale);
    D::store(out + i, _mm512_mul_ps(v, W::load(weight + i, m)), m);
  }
}

// sum = round(x + residual)
template <class D>
static inline void add_row(const typename D::T* x, const typename D::T* residual,
                           typename D::T* sum, int size) {
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    D::store(sum + i, _mm512_add_ps(D::load(x + i, m), D::load(residual + i, m)), m);
  }
}

// One head; `table` is the position's row: cosines of the first half, then sines.
template <class D>
static inline void rope_head(const typename D::T* x, typename D::T* out, const float* table,
                             int size) {
  const int half = size / 2;
  for (int i = 0; i < half; i += 16) {
    const __mmask16 m = tail_mask(half - i);
    const V16 a = D::load(x + i, m), b = D::load(x + half + i, m);
    const V16 cosine = F32::load(table + i, m), sine = F32::load(table + half + i, m);
    D::store(out + i, _mm512_fnmadd_ps(b, sine, _mm512_mul_ps(a, cosine)), m);
    D::store(out + half + i, _mm512_fmadd_ps(a, sine, _mm512_mul_ps(b, cosine)), m);
  }
}

template <class D>
static inline void silu_mul_row(const typename D::T* gate, const typename D::T* up,
                                typename D::T* out, int size) {
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    D::store(out + i, _mm512_mul_ps(silu16(D::load(gate + i, m)), D::load(up + i, m)), m);
  }
}

template <class D>
static inline void gelu_mul_row(const typename D::T* gate, const typename D::T* up,
                                typename D::T* out, int size) {
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    D::store(out + i, _mm512_mul_ps(gelu16(D::load(gate + i, m)), D::load(up + i, m)), m);
  }
}

// silu_mul on the sums of a product, rounded in between as if they had been stored.
template <class D>
static inline void silu_mul_sums(const float* gate, const float* up,
                                 const typename D::T* gate_bias, const typename D::T* up_bias,
                                 typename D::T* out, int size) {
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    const V16 g = D::round(result16<D>(gate, gate_bias, i, m));
    const V16 u = D::round(result16<D>(up, up_bias, i, m));
    D::store(out + i, _mm512_mul_ps(silu16(g), u), m);
  }
}

// Likewise with a bounded gate: (up + 1) * gate * sigmoid(alpha * gate), of which gate is held to at
// most `limit` and up to at most as much on either side.
template <class D>
static inline void clamped_mul_sums(const float* gate, const float* up,
                                    const typename D::T* gate_bias, const typename D::T* up_bias,
                                    typename D::T* out, int size, float alpha, float limit) {
  const V16 most = _mm512_set1_ps(limit), least = _mm512_set1_ps(-limit);
  const V16 one = _mm512_set1_ps(1.0f), steep = _mm512_set1_ps(alpha);
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    // The order of operands keeps NaN.
    const V16 g = _mm512_min_ps(most, D::round(result16<D>(gate, gate_bias, i, m)));
    const V16 u = _mm512_max_ps(least, _mm512_min_ps(most, D::round(result16<D>(up, up_bias, i, m))));
    const V16 gated = gate16(g, _mm512_mul_ps(steep, g));
    D::store(out + i, _mm512_mul_ps(gated, _mm512_add_ps(u, one)), m);
  }
}

// to += sums, likewise.
template <class D>
static inline void add_sums(const float* sums, const typename D::T* bias, typename D::T* to,
                            int size) {
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    const V16 change = D::round(result16<D>(sums, bias, i, m));
    D::store(to + i, _mm512_add_ps(change, D::load(to + i, m)), m);
  }
}

}  // namespace oct
