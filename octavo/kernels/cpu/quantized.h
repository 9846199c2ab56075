// Weights of 8 and 4 bits under activations of 8 bits.
//
// A row of x is rounded in groups of 128 values, each by its own largest; behind the values stand
// the groups' scales and, for each 32 values, their sum: weights are stored without a sign, and
// what that adds to a product is a multiple of the sum. Sums of 8-bit products are whole numbers,
// so they are exact; they are scaled and added up in f32, in order.
//
// Packed weights begin with a line that says how they are packed. 8 bits: panels as in gemm.h with
// four values along K a step, stored plus 128; then a scale for each column, f32. 4 bits: a step is
// 64 bytes, columns 0 to 15 in the low halves; behind the steps of a group stand its columns' scales
// and zero points, f16. Next file: products.h.
#pragma once

#include "gemm.h"

namespace oct {

constexpr int kScaled = 128;  // values of x in 8 bits that share a scale
constexpr int kSummed = 32;   // values of x whose sum is kept

struct QuantHeader {
  int bits, group;
  int unused[14];
};

// Bytes that a row of `size` values takes at most, in 8 bits.
static inline long quantized_row_bytes(long size) {
  return size + 8 + ceil_div(size, kScaled) * 4 + ceil_div(size, kSummed) * 4;
}

static inline Matrix quantized(const void* data, int rows, int columns, int bits, int group) {
  Matrix w;
  w.data = (const char*)data + sizeof(QuantHeader);
  w.rows = rows;
  w.columns = columns;
  w.panels = (int)ceil_div(rows, kPanel);
  w.steps = (int)ceil_div(columns, 4);
  w.bits = bits;
  w.group = group;
  w.panel_bytes = bits == 8 ? (long)w.steps * 128 : (long)w.steps * 64 + columns / group * 128L;
  return w;
}

static inline float* column_scales(const Matrix& w) { return (float*)w.panel(w.panels); }

static inline long quantized_bytes(const Matrix& w) {
  return sizeof(QuantHeader) + w.panels * (w.panel_bytes + (w.bits == 8 ? kPanel * 4 : 0));
}

template <class W>
static inline Matrix packed_matrix(const void* data, int rows, int columns) {
  if constexpr (is_quantized<W>()) {
    const QuantHeader* header = (const QuantHeader*)data;
    return quantized(data, rows, columns, header->bits, header->group);
  } else {
    return matrix<W>(data, rows, columns);
  }
}

#ifdef __AVX512VNNI__
// Rows of 8 bits: each by its own largest value, rounded to nearest.
template <class D>
static void pack_int8(const typename D::T* source, long stride, int rows, int columns,
                      void* packed) {
  const Matrix w = quantized(packed, rows, columns, 8, 0);
  std::memset(packed, 0, quantized_bytes(w));
  ((QuantHeader*)packed)->bits = 8;
  for (int row = 0; row < rows; ++row) {
    const typename D::T* in = source + row * stride;
    V16 most = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) {
      most = _mm512_max_ps(most, _mm512_abs_ps(D::load(in + k, tail_mask(columns - k))));
    }
    const float top = max_lanes(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    uint8_t* out = (uint8_t*)w.panel(row / kPanel) + row % kPanel * 4;
    for (int k = 0; k < w.steps * 4; ++k) out[k / 4 * 128 + k % 4] = 128;
    for (int k = 0; k < columns; k += 16) {
      float values[16];
      _mm512_storeu_ps(values, D::load(in + k, tail_mask(columns - k)));
      for (int i = k; i < std::min(columns, k + 16); ++i) {
        out[i / 4 * 128 + i % 4] = (uint8_t)(128 + (int)std::nearbyint(values[i - k] * inverse));
      }
    }
    column_scales(w)[row] = top / 127.0f;
  }
}

static inline uint16_t to_half(float value) {
  const __m128i half = _mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT);
  return (uint16_t)_mm_extract_epi16(half, 0);
}

// Codes of 0 to 15 [rows][columns], scales and zero points [rows][columns / group].
static void pack_int4(const uint8_t* codes, const float* scales, const float* zeros, int rows,
                      int columns, int group, void* packed) {
  const Matrix w = quantized(packed, rows, columns, 4, group);
  const int groups = columns / group;
  std::memset(packed, 0, quantized_bytes(w));
  *(QuantHeader*)packed = QuantHeader{4, group, {}};
  for (int row = 0; row < rows; ++row) {
    uint8_t* out = (uint8_t*)w.panel(row / kPanel);
    const int column = row % kPanel, at = column % 16 * 4, shift = column / 16 * 4;
    for (int g = 0; g < groups; ++g) {
      const uint8_t* from = codes + (long)row * columns + g * group;
      for (int k = 0; k < group; ++k) out[k / 4 * 64 + at + k % 4] |= from[k] << shift;
      out += group / 4 * 64;
      ((uint16_t*)out)[column] = to_half(scales[(long)row * groups + g]);
      ((uint16_t*)out)[kPanel + column] = to_half(zeros[(long)row * groups + g]);
      out += 4 * kPanel;
    }
  }
}

// Row `row` of a matrix of 8 bits, as an embedding needs it.
template <class D>
static void unpack_row_int8(const Matrix& w, int row, typename D::T* out) {
  const uint8_t* in = (const uint8_t*)w.panel(row / kPanel) + row % kPanel * 4;
  const V16 scale = _mm512_set1_ps(column_scales(w)[row]);
  for (int k = 0; k < w.columns; k += 16) {
    int32_t fours[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4 && k + i * 4 < w.columns; ++i) {
      std::memcpy(&fours[i], in + (k / 4 + i) * 128, 4);
    }
    const __m512i q = _mm512_sub_epi32(
        _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)fours)), _mm512_set1_epi32(128));
    D::store(out + k, _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale), tail_mask(w.columns - k));
  }
}

// A row in 8 bits: groups of 128 values, each by its own largest, filled up to whole steps; then the
// groups' scales, then sums. Few channels of a model are much larger than the rest, and would
// otherwise round it away.
template <class D>
static void quantize_row(const typename D::T* x, int8_t* out, int size) {
  const int filled = (size + 3) / 4 * 4;
  const int groups = (int)ceil_div(size, kScaled);
  float* scales = (float*)(out + filled);
  float* sums = scales + groups;
  for (int first = 0; first < size; first += kScaled) {
    constexpr int count = kScaled / 16;
    V16 most = _mm512_setzero_ps(), v[count];
    __mmask16 nan = 0;
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const int left = size - first - i * 16;
      v[i] = D::load(x + first + i * 16, left > 0 ? tail_mask(left) : 0);
      nan |= _mm512_cmp_ps_mask(v[i], v[i], _CMP_UNORD_Q);
      most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
    }
    const float top = max_lanes(most);
    const V16 inverse = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
    __m512i last = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const int left = filled - first - i * 16;
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
      _mm_mask_storeu_epi8(out + first + i * 16, left > 0 ? tail_mask(left) : 0,
                           _mm512_cvtsepi32_epi8(q));
      if (i % 2 && left > -16) {
        const float sum = (float)_mm512_reduce_add_epi32(_mm512_add_epi32(last, q));
        std::memcpy(sums + (first + i * 16) / kSummed, &sum, 4);
      }
      last = q;
    }
    // NaN and infinity must not vanish: they make the scale, and with it the whole row, NaN.
    const float scale = !nan && top < INFINITY ? top / 127.0f : NAN;
    std::memcpy(scales + first / kScaled, &scale, 4);
  }
}

// R rows x one panel over some steps, in i32. Apart from the scaling, or registers run out.
template <int R>
static __attribute__((noinline)) void tile_int8(const int8_t* x, long stride, const char* panel,
                                                int steps, int32_t* sums, const char* next) {
  __m512i sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int s = 0; s < steps; ++s) {
    const __m512i b0 = _mm512_loadu_si512(panel), b1 = _mm512_loadu_si512(panel + 64);
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 64, _MM_HINT_T0);
    panel += 128;
    next += 128;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * stride, 4);
      const __m512i a = _mm512_set1_epi32(four);
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], b0, a);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b1, a);
    }
    x += 4;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(sums + r * kPanel, sum[r][0]);
    _mm512_storeu_si512(sums + r * kPanel + 16, sum[r][1]);
  }
}

// What stands behind a row's values.
struct RowTail {
  const char* scales;
  const char* sums;
  RowTail(const int8_t* x, const Matrix& w)
      : scales((const char*)x + w.steps * 4), sums(scales + ceil_div(w.columns, kScaled) * 4) {}
  static float at(const char* from, long row_offset, int i) {
    float value;
    std::memcpy(&value, from + row_offset + i * 4, 4);
    return value;
  }
};

// R rows x one panel, as `tile` of gemm.h: the groups' sums are scaled and added up in f32.
template <int R>
static void tiles_int8(const int8_t* x, long stride, const Matrix& w, int index, float* sums,
                       int sums_stride, const char* next) {
  alignas(64) int32_t group[R * kPanel];
  constexpr int most = kScaled / 4;
  const RowTail tail(x, w);
  const int groups = (int)ceil_div(w.steps, most), steps = w.steps;
  const int summed = (int)ceil_div(w.columns, kSummed);
  const char* panel = w.panel(index);
  const float* columns = column_scales(w) + index * kPanel;
  for (int g = 0; g < groups; ++g) {
    tile_int8<R>(x + g * most * 4, stride, panel + g * most * 128,
                 std::min(most, steps - g * most), group, next + g * most * 128);
    float scale[R], sum[R];
    for (int r = 0; r < R; ++r) {
      scale[r] = RowTail::at(tail.scales, r * stride, g);
      sum[r] = 0;
      for (int i = g * 4; i < std::min(g * 4 + 4, summed); ++i) {
        sum[r] += RowTail::at(tail.sums, r * stride, i);
      }
    }
    for (int c = 0; c < kPanel; c += 16) {
      const V16 column = _mm512_loadu_ps(columns + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i offset = _mm512_set1_epi32(128 * (int)sum[r]);
        const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(group + r * kPanel + c), offset);
        const V16 by = _mm512_mul_ps(column, _mm512_set1_ps(scale[r]));
        float* to = sums + r * sums_stride + c;
        const V16 old = g ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), by, old));
      }
    }
  }
}

// A few rows x one panel of 4 bits: groups are short, so their sums stay in registers.
template <int R>
static __attribute__((noinline)) void tile_int4(const int8_t* x, long stride, const Matrix& w,
                                                const char* panel, float* sums, int sums_stride,
                                                const char* next) {
  const __m512i low = _mm512_set1_epi8(15);
  const RowTail tail(x, w);
  const int steps = w.group / 4, groups = w.columns / w.group, a_group = w.group / kSummed;
  V16 out[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r][0] = out[r][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    __m512i sum[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int s = 0; s < steps; ++s) {
      const __m512i both = _mm512_loadu_si512(panel);
      const __m512i b0 = _mm512_and_si512(both, low);
      const __m512i b1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      _mm_prefetch(next, _MM_HINT_T0);
      panel += 64;
      next += 64;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * stride, 4);
        const __m512i a = _mm512_set1_epi32(four);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], b0, a);
        sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b1, a);
      }
      x += 4;
    }
    V16 column[2], zero[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      column[h] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(panel + h * 32)));
      zero[h] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(panel + 64 + h * 32)));
      _mm_prefetch(next + h * 64, _MM_HINT_T0);
    }
    panel += 4 * kPanel;
    next += 4 * kPanel;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float total = RowTail::at(tail.sums, r * stride, g * a_group);
      for (int i = 1; i < a_group; ++i) total += RowTail::at(tail.sums, r * stride, g * a_group + i);
      const V16 by = _mm512_set1_ps(RowTail::at(tail.scales, r * stride, g * w.group / kScaled));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const V16 exact =
            _mm512_fnmadd_ps(zero[h], _mm512_set1_ps(total), _mm512_cvtepi32_ps(sum[r][h]));
        out[r][h] = _mm512_fmadd_ps(exact, _mm512_mul_ps(column[h], by), out[r][h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(sums + r * sums_stride, out[r][0]);
    _mm512_storeu_ps(sums + r * sums_stride + 16, out[r][1]);
  }
}

template <int R>
static void tiles_int4(const int8_t* x, long stride, const Matrix& w, int index, float* sums,
                       int sums_stride, const char* next) {
  const char* panel = w.panel(index);
  constexpr int last = R % 4;
  for (int r = 0; r + 4 <= R; r += 4) {
    tile_int4<4>(x + r * stride, stride, w, panel, sums + r * sums_stride, sums_stride, next);
    next = panel;  // what was fetched once is near
  }
  if constexpr (last != 0) {
    constexpr int r = R - last;
    tile_int4<last>(x + r * stride, stride, w, panel, sums + r * sums_stride, sums_stride, next);
  }
}
#endif

}  // namespace oct
