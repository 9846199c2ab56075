// y = x w^T for weights packed in panels of 32 output columns.
//
// A panel is [steps][32][kStep] values, 128 bytes a step: with bf16 a step is a pair of neighbours
// along K, with f32 one value, with 8 bits four. N and K are padded with zeros. Panels of 8 bits
// are followed by a scale for each column, f32, and for each panel and 128 values of K by -128 times
// the column's sum over them, i32 [groups][32]. Each output is one chain of sums
// over K in rising order, whatever the number of rows: results do not depend on the batch.
// Next file: rows.h.
#pragma once

#include <type_traits>

#include "pool.h"

namespace oct {

constexpr int kPanel = 32;      // columns
constexpr int kTileRows = 12;   // most rows of a register tile: 12 x 2 sums
constexpr int kMaxGroup = 16;   // most panels of one work item
constexpr int kScaled = 128;    // values of x in 8 bits that share a scale

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
  const char* panel(int i) const { return data + i * panel_bytes; }
  float* scales() const { return (float*)panel(panels); }
  int groups() const { return (steps + kScaled / 4 - 1) / (kScaled / 4); }  // with 8 bits
  int32_t* offsets(int i) const {
    return (int32_t*)(scales() + panels * kPanel) + (long)i * groups() * kPanel;
  }
};

template <class W>
constexpr bool is_int8() { return W::kStep == 4; }

template <class D>
static inline Matrix matrix(const void* data, int rows, int columns) {
  Matrix w;
  w.data = (const char*)data;
  w.rows = rows;
  w.columns = columns;
  w.panels = (int)ceil_div(rows, kPanel);
  w.steps = (int)ceil_div(columns, D::kStep);
  w.panel_bytes = (long)w.steps * 128;
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

static inline long int8_bytes(const Matrix& w) {
  return w.panels * (w.panel_bytes + kPanel * 4 * (1 + w.groups()));
}

#ifdef __AVX512VNNI__
// Rows of 8 bits: each by its own largest value, rounded to nearest.
template <class D>
static void pack_int8(const typename D::T* source, long stride, int rows, int columns,
                      void* packed) {
  const Matrix w = matrix<INT8>(packed, rows, columns);
  std::memset(packed, 0, int8_bytes(w));
  for (int row = 0; row < rows; ++row) {
    const typename D::T* in = source + row * stride;
    V16 most = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) {
      most = _mm512_max_ps(most, _mm512_abs_ps(D::load(in + k, tail_mask(columns - k))));
    }
    const float top = max_lanes(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    int8_t* out = (int8_t*)w.panel(row / kPanel) + row % kPanel * 4;
    int32_t* offset = w.offsets(row / kPanel) + row % kPanel;
    for (int k = 0; k < columns; k += 16) {
      float values[16];
      _mm512_storeu_ps(values, D::load(in + k, tail_mask(columns - k)));
      for (int i = k; i < std::min(columns, k + 16); ++i) {
        const int8_t q = (int8_t)std::nearbyint(values[i - k] * inverse);
        out[i / 4 * 128 + i % 4] = q;
        offset[i / kScaled * kPanel] -= 128 * q;
      }
    }
    w.scales()[row] = top / 127.0f;
  }
}

template <class D>
static void unpack_row_int8(const Matrix& w, int row, typename D::T* out) {
  const int8_t* in = (const int8_t*)w.panel(row / kPanel) + row % kPanel * 4;
  const V16 scale = _mm512_set1_ps(w.scales()[row]);
  for (int k = 0; k < w.columns; k += 16) {
    int32_t fours[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4 && k + i * 4 < w.columns; ++i) {
      std::memcpy(&fours[i], in + (k / 4 + i) * 128, 4);
    }
    const __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)fours));
    D::store(out + k, _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale), tail_mask(w.columns - k));
  }
}

// A row in 8 bits: groups of 128 values, each by its own largest, filled up to whole steps; then the
// groups' scales. Few channels of a model are much larger than the rest, and would otherwise round
// it away.
template <class D>
static void quantize_row(const typename D::T* x, uint8_t* out, int size) {
  const int filled = (size + 3) / 4 * 4;
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
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const int left = filled - first - i * 16;
      const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse)),
                                         _mm512_set1_epi32(128));
      _mm_mask_storeu_epi8(out + first + i * 16, left > 0 ? tail_mask(left) : 0,
                           _mm512_cvtusepi32_epi8(q));
    }
    // NaN and infinity must not vanish: they make the scale, and with it the whole row, NaN.
    const float scale = !nan && top < INFINITY ? top / 127.0f : NAN;
    std::memcpy(out + filled + first / kScaled * 4, &scale, 4);
  }
}

// R rows x one panel over one group of K, in i32. Apart from the scaling, or registers run out.
template <int R>
static __attribute__((noinline)) void tile_int8(const uint8_t* x, long stride, const char* panel,
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
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a, b0);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], a, b1);
    }
    x += 4;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(sums + r * kPanel, sum[r][0]);
    _mm512_storeu_si512(sums + r * kPanel + 16, sum[r][1]);
  }
}

// R rows x one panel, as `tile` below: the groups' sums are scaled and added up in f32, in order.
template <int R>
static void tiles_int8(const uint8_t* x, long stride, const Matrix& w, int index, float* sums,
                       int sums_stride, const char* next) {
  alignas(64) int32_t group[R * kPanel];
  constexpr int most = kScaled / 4;
  const uint8_t* scales = x + w.steps * 4;
  const int groups = w.groups(), steps = w.steps;
  const char* panel = w.panel(index);
  const int32_t* offsets = w.offsets(index);
  const float* columns = w.scales() + index * kPanel;
  for (int g = 0; g < groups; ++g) {
    tile_int8<R>(x + g * most * 4, stride, panel + g * most * 128,
                 std::min(most, steps - g * most), group, next + g * most * 128);
    for (int c = 0; c < kPanel; c += 16) {
      const __m512i offset = _mm512_loadu_si512(offsets + g * kPanel + c);
      const V16 column = _mm512_loadu_ps(columns + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float value;
        std::memcpy(&value, scales + r * stride + g * 4, 4);
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(group + r * kPanel + c), offset);
        const V16 scale = _mm512_mul_ps(column, _mm512_set1_ps(value));
        float* to = sums + r * sums_stride + c;
        const V16 old = g ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, old));
      }
    }
  }
}
#endif

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

template <class D>
static inline void any_tile(int rows, const typename D::T* x, long stride, const Matrix& w,
                            int index, float* sums, int sums_stride, const char* next) {
  switch (rows) {
#define OCT_CALL(R)                                                                     \
  case R:                                                                               \
    if constexpr (is_int8<D>()) {                                                       \
      return tiles_int8<R>(x, stride, w, index, sums, sums_stride, next);               \
    } else {                                                                            \
      return tile<D, R>(x, stride, w.panel(index), w.steps, sums, sums_stride, next);   \
    }
    OCT_CALL(1) OCT_CALL(2) OCT_CALL(3) OCT_CALL(4) OCT_CALL(5) OCT_CALL(6)
    OCT_CALL(7) OCT_CALL(8) OCT_CALL(9) OCT_CALL(10) OCT_CALL(11) OCT_CALL(12)
#undef OCT_CALL
  }
}

constexpr long kAhead = 4096;  // bytes between a load and its prefetch while a panel streams in

// Rows [first, last) of x against `count` panels: done(row, rows, sums, stride) gets each tile.
// `after` is where this thread will probably read next, null if here again.
template <class D, class Done>
static inline void multiply(const typename D::T* x, long stride, int first, int last,
                            const Matrix& w, const int* panels, int count, const char* after,
                            Done&& done) {
  alignas(64) float sums[kTileRows * kPanel * kMaxGroup];
  const int width = count * kPanel;
  const int tiles = (int)ceil_div(last - first, kTileRows);
  int row = first;
  for (int t = 0; t < tiles; ++t) {
    const int rows = (last - row + (tiles - t) - 1) / (tiles - t);
    for (int p = 0; p < count; ++p) {
      const char* panel = w.panel(panels[p]);
      const char* next;
      if (tiles == 1) {
        next = panel + kAhead;
      } else if (t == 0 && after) {
        next = after + p * w.panel_bytes;
      } else {
        next = (const char*)(x + (t + 1 < tiles ? row + rows : first) * stride);
      }
      any_tile<D>(rows, x + row * stride, stride, w, panels[p], sums + p * kPanel, width, next);
    }
    done(row, rows, sums, width);
    row += rows;
  }
}

constexpr int kSmallRows = 4 * kTileRows;  // up to here items are single panels
constexpr int kBlockRows = 6 * kTileRows;  // of one item

// How a product is cut into work items: small enough that threads end a phase together, large
// enough that panels and rows are read from near caches.
struct Cut {
  int group;   // panels of an item
  int groups;
  int blocks;  // of rows
  int items;
};

static inline Cut cut(int panels, int rows, int threads, int align = 1) {
  Cut c;
  c.group = rows <= kSmallRows ? 1 : 3;
  if (c.group % align) c.group = (int)ceil_div(c.group, align) * align;
  while (c.group > align && ceil_div(panels, c.group) < 2 * threads) --c.group;
  if (c.group % align) c.group = align;
  c.groups = (int)ceil_div(panels, c.group);
  c.blocks = (int)ceil_div(rows, kBlockRows);
  c.items = c.groups * c.blocks;
  return c;
}

static inline int block_start(int rows, int blocks, int i) { return (int)((long)rows * i / blocks); }

// The whole product as one phase; done(row, rows, column, columns, sums, stride).
template <class D, class Done>
static inline void product(Team& team, const typename D::T* x, long stride, int rows,
                           const Matrix& w, Done&& done, const char* upcoming = nullptr) {
  const Cut c = cut(w.panels, rows, team.size);
  team.run(
      c.items, false,
      [&](int item) {
        const int first = item / c.blocks * c.group;
        const int count = std::min(c.group, w.panels - first);
        int panels[kMaxGroup];
        for (int p = 0; p < count; ++p) panels[p] = first + p;
        const int block = item % c.blocks;
        const int column = first * kPanel;
        const int columns = std::min(count * kPanel, w.rows - column);
        multiply<D>(x, stride, block_start(rows, c.blocks, block),
                    block_start(rows, c.blocks, block + 1), w, panels, count,
                    block + 1 < c.blocks ? nullptr : w.panel(first + count),
                    [&](int row, int n, const float* sums, int width) {
                      done(row, n, column, columns, sums, width);
                    });
      },
      [&] {
        if (upcoming)
          for (int i = 0; i < 16384; i += 64) _mm_prefetch(upcoming + i, _MM_HINT_T1);
      });
}

// Sums [i, i + 16), with bias if any.
template <class D>
static inline V16 result16(const float* sums, const typename D::T* bias, int i, __mmask16 m) {
  V16 v = _mm512_loadu_ps(sums + i);
  if (bias) v = _mm512_add_ps(v, D::load(bias + i, m));
  return v;
}

// One row of sums -> out, with bias if any; D is the type of the bias, O of the result.
template <class D, class O>
static inline void put_row(const float* sums, const typename D::T* bias, typename O::T* out,
                           int columns) {
  for (int c = 0; c < columns; c += 16) {
    const __mmask16 m = tail_mask(columns - c);
    O::store(out + c, result16<D>(sums, bias, c, m), m);
  }
}

}  // namespace oct
