// Whole products: register tiles over panels, cut into work items for the pool.
//
// Next file: rows.h.
#pragma once

#include "quantized.h"

namespace oct {

template <class D>
static inline void any_tile(int rows, const typename D::T* x, long stride, const Matrix& w,
                            int index, float* sums, int sums_stride, const char* next) {
  switch (rows) {
#define OCT_CALL(R)                                                                     \
  case R:                                                                               \
    if constexpr (is_quantized<D>()) {                                                  \
      return w.bits == 4 ? tiles_int4<R>(x, stride, w, index, sums, sums_stride, next)  \
                         : tiles_int8<R>(x, stride, w, index, sums, sums_stride, next); \
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
