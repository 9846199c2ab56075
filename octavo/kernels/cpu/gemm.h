// y = x w^T for weights packed in panels of 32 output columns.
//
// A panel is [steps][32][kStep] values, 128 bytes a step: with bf16 a step is a pair of neighbours
// along K, with f32 one value. N and K are padded with zeros. Each output is one chain of sums over
// K in rising order, whatever the number of rows: results do not depend on the batch.
// Weights of 8 and 4 bits are in quantized.h. Next file: quantized.h.
#pragma once

#include <type_traits>

#include "pool.h"

namespace oct {

constexpr int kPanel = 32;      // columns
constexpr int kTileRows = 12;   // most rows of a register tile: 12 x 2 sums
constexpr int kMaxGroup = 16;   // most panels of one work item

static inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// A row length, in values, whose cache lines spread over all sets.
template <class D>
static inline long padded(long values) {
  const long lines = ceil_div(values * (long)sizeof(typename D::T), kLine) | 1;
  return lines * kLine / (long)sizeof(typename D::T);
}

struct Matrix {
  const char* data;
  int rows;     // N
  int columns;  // K
  int panels;
  int steps;
  long panel_bytes;
  int bits;   // 8 or 4 of quantized weights, else 0
  int group;  // columns that share a scale, with 4 bits
  const char* panel(int i) const { return data + i * panel_bytes; }
};

template <class W>
constexpr bool is_quantized() { return W::kStep == 4; }

template <class D>
static inline Matrix matrix(const void* data, int rows, int columns) {
  Matrix w;
  w.data = (const char*)data;
  w.rows = rows;
  w.columns = columns;
  w.panels = (int)ceil_div(rows, kPanel);
  w.steps = (int)ceil_div(columns, D::kStep);
  w.panel_bytes = (long)w.steps * 128;
  w.bits = w.group = 0;
  return w;
}

template <class D>
static void pack(const typename D::T* source, long stride, int rows, int columns, void* packed) {
  typedef typename D::T T;
  const Matrix w = matrix<D>(packed, rows, columns);
  for (int p = 0; p < w.panels; ++p) {
    T* out = (T*)w.panel(p);
    for (int s = 0; s < w.steps; ++s) {
      for (int c = 0; c < kPanel; ++c) {
        const int row = p * kPanel + c;
        for (int i = 0; i < D::kStep; ++i, ++out) {
          const int k = s * D::kStep + i;
          *out = row < rows && k < columns ? source[row * stride + k] : T(0);
        }
      }
    }
  }
}

// Row `row` of a packed matrix, as an embedding needs it.
template <class D>
static void unpack_row(const Matrix& w, int row, typename D::T* out) {
  typedef typename D::T T;
  const char* in = w.panel(row / kPanel) + (row % kPanel) * D::kStep * sizeof(T);
  const int whole = w.columns / D::kStep;
  for (int s = 0; s < whole; ++s, in += 128) {
    std::memcpy(out + s * D::kStep, in, D::kStep * sizeof(T));
  }
  if (whole < w.steps) out[whole * D::kStep] = *(const T*)in;
}

// R rows x one panel. Prefetches 128 bytes a step from `next`.
template <class D, int R>
static void tile(const typename D::T* x, long stride, const char* panel, int steps, float* sums,
                 int sums_stride, const char* next) {
  V16 sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int s = 0; s < steps; ++s) {
    const V16 b0 = D::raw(panel), b1 = D::raw(panel + 64);
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 64, _MM_HINT_T0);
    panel += 128;
    next += 128;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V16 a = D::broadcast(x + r * stride);
      sum[r][0] = D::mad(sum[r][0], a, b0);
      sum[r][1] = D::mad(sum[r][1], a, b1);
    }
    x += D::kStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(sums + r * sums_stride, sum[r][0]);
    _mm512_storeu_ps(sums + r * sums_stride + 16, sum[r][1]);
  }
}

}  // namespace oct
