// Paged attention: pages, storing, and softmax(q k^T) v for decode and prefill rows alike.
//
// A page of one head holds P tokens in groups of 16 (the last may be narrower, w tokens):
//     keys    group at 16 g D:  [D / kStep][w][kStep]
//     values  bf16: pairs of tokens [P / 2][D][2], then the odd token [D]; f32: [P][D]
// Positions are cut into segments at multiples of a fixed number of pages. Within a segment the
// softmax has one maximum, and segments are merged in order. Both depend on a token's position
// alone, so that a row's result is the same bits in decode, in any prefill chunk, on any thread.
// Pages of 8-bit floats have the same order; a segment's are widened before they are used.
// Masked tokens add exact zeros. Next file: sample.h.
#pragma once

#include <algorithm>

#include "narrow.h"
#include "rows.h"

namespace oct {

struct Heads {
  int queries;  // Q
  int keys;     // K
  int size;     // D
  int page;     // P
  float scale;
  float cap;   // 0 is none
  int window;  // 0 is none
  int cache;   // a CacheKind
  float key_scale, value_scale;  // what pages of 8-bit floats hold was divided by these

  int group() const { return queries / keys; }
  int groups_a_page() const { return (page + 15) / 16; }
  int pages_a_segment() const { return std::max(1, 32 / groups_a_page()); }
  int groups_a_segment() const { return pages_a_segment() * groups_a_page(); }
  int tokens_a_segment() const { return pages_a_segment() * page; }
  int tokens_an_item() const { return std::max(1, 24 / group()); }
  int rows_an_item() const { return tokens_an_item() * group(); }
};

struct Rows {
  int count;
  const int* q_indptr;
  const int* kv_lens;
  const int* block_table;
  long width;  // of the block table
};

template <class D, class T>
static inline void store_key(const T* key, T* page, int at, int size, int tokens) {
  const int group = at / 16, lane = at % 16, w = std::min(16, tokens - group * 16);
  T* out = page + (long)group * 16 * size + lane * D::kStep;
  for (int d = 0; d < size; d += D::kStep, out += w * D::kStep) {
    std::memcpy(out, key + d, D::kStep * sizeof(T));
  }
}

template <class D, class T>
static inline void store_value(const T* value, T* page, int at, int size, int tokens) {
  if (D::kStep == 1 || (at == tokens - 1 && at % 2 == 0)) {
    std::memcpy(page + (long)at * size, value, size * sizeof(T));
    return;
  }
  T* out = page + (long)(at / 2 * 2) * size + at % 2;
  for (int d = 0; d < size; ++d) out[d * 2] = value[d];
}

constexpr int kMaxHead = 256;

// Keys or values of one token and key head into their cell, in the pages' format.
template <class D, bool is_key>
static inline void store_head(const Heads& h, const typename D::T* x, int slot, int head,
                              void* pages) {
  typedef typename D::T T;
  const long page = ((long)(slot / h.page) * h.keys + head) * h.page * h.size;
  const int at = slot % h.page;
  if (h.cache == kSame) {
    T* to = (T*)pages + page;
    is_key ? store_key<D>(x, to, at, h.size, h.page) : store_value<D>(x, to, at, h.size, h.page);
    return;
  }
  uint8_t bytes[kMaxHead];
  uint8_t* to = (uint8_t*)pages + page;
  narrow_row<D>(x, bytes, h.size, h.cache, is_key ? h.key_scale : h.value_scale);
  const uint8_t* from = bytes;
  is_key ? store_key<D>(from, to, at, h.size, h.page)
         : store_value<D>(from, to, at, h.size, h.page);
}

// A group of up to 16 neighbouring tokens of one head.
struct Group {
  const char* key;
  const char* value;
  int width;     // tokens that fit
  int used;      // tokens that any row of the item may see
  int position;  // of the first
};

// Scores of R rows against G groups: out[r * stride + g * 16 + lane].
template <class D, int R, int G>
static void score(const typename D::T* q, int size, const Group* groups, float* out, int stride,
                  bool fetch) {
  typedef typename D::T T;
  V16 sum[R][G];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sum[r][g] = _mm512_setzero_ps();
  constexpr int line = 16 * sizeof(T);  // bytes that a group holds of one dimension
  const char* key[G];
  long step[G];
  __mmask16 mask[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    key[g] = groups[g].key;
    step[g] = (long)groups[g].width * D::kStep * sizeof(T);
    mask[g] = tail_mask(groups[g].width);
  }
  for (int d = 0; d < size; d += D::kStep) {
    V16 k[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      k[g] = _mm512_maskz_loadu_ps(mask[g], key[g]);
      key[g] += step[g];
      if (fetch) {
        // Pages lie scattered in memory: the next groups' keys, and these tokens' values.
        _mm_prefetch(groups[g + G].key + d * line, _MM_HINT_T0);
        _mm_prefetch(groups[g].value + d * line, _MM_HINT_T1);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V16 a = D::broadcast(q + (long)r * size + d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sum[r][g] = D::mad(sum[r][g], a, k[g]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(out + (long)r * stride + g * 16, sum[r][g]);
}

template <class D, int R>
static inline void score_rows(const typename D::T* q, int size, const Group* groups, int count,
                              float* out, int stride, bool fetch) {
  int g = 0;
  for (; g + 4 <= count; g += 4) score<D, R, 4>(q, size, groups + g, out + g * 16, stride, fetch);
  for (; g < count; ++g) score<D, R, 1>(q, size, groups + g, out + g * 16, stride, fetch);
}

// Weighted sums of values: R rows, N x 16 dimensions from `d`; weights[r * stride + g * 16 + lane].
template <class D, int R, int N>
static void mix(const typename D::T* weights, int stride, const Group* groups, int count, int size,
                int d, float* out) {
  typedef typename D::T T;
  V16 sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = _mm512_setzero_ps();
  for (int g = 0; g < count; ++g) {
    const Group& group = groups[g];
    const T* w = weights + g * 16;
    const int whole = group.used / D::kStep;
    const T* v = (const T*)group.value + d * D::kStep;
    for (int t = 0; t < whole; ++t) {
      V16 b[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) b[n] = D::raw(v + n * 16 * D::kStep);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const V16 a = D::broadcast(w + (long)r * stride + t * D::kStep);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = D::mad(sum[r][n], a, b[n]);
      }
      v += size * D::kStep;
    }
    if (D::kStep == 2 && group.used % 2) {
      // One token without its neighbour, whose cell may hold anything: it must not be read as
      // a number, not even times zero.
      const bool single = group.used == group.width;  // stored unpaired at the end of a page
      V16 b[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const T* p = single ? v - d + n * 16 : v + n * 32;
        const __m512i pair = single
            ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))
            : _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff));
        b[n] = _mm512_castsi512_ps(pair);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const V16 a = D::broadcast(w + (long)r * stride + whole * 2);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = D::mad(sum[r][n], a, b[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(out + (long)r * size + d + n * 16, sum[r][n]);
}

template <class D, int R>
static inline void mix_rows(const typename D::T* weights, int stride, const Group* groups,
                            int count, int size, float* out) {
  int d = 0;
  for (; d + 64 <= size; d += 64) mix<D, R, 4>(weights, stride, groups, count, size, d, out);
  for (; d < size; d += 16) mix<D, R, 1>(weights, stride, groups, count, size, d, out);
}

// f(integral constant R, first row): covers `rows` rows in register tiles.
template <class F>
static inline void in_row_tiles(int rows, F&& f) {
  int r = 0;
  for (; rows - r >= 6; r += 6) f(std::integral_constant<int, 6>(), r);
  switch (rows - r) {
    case 5: f(std::integral_constant<int, 5>(), r); break;
    case 4: f(std::integral_constant<int, 4>(), r); break;
    case 3: f(std::integral_constant<int, 3>(), r); break;
    case 2: f(std::integral_constant<int, 2>(), r); break;
    case 1: f(std::integral_constant<int, 1>(), r); break;
    default: break;
  }
}

// A work item: `tokens` neighbouring query tokens of one sequence and one key head, over segments
// [first, last). If `part` is set the segments' results go there unmerged.
struct Item {
  int row;
  int token;  // index in the batch of the first one
  int position;
  int tokens;
  int head;
  int first;
  int last;
  int pending;  // index of the merge that waits for this item, or -1
  float* part;
  long cost;
};

// Per row of an item: maximum, sum of weights, weighted values [D].
template <class D>
struct Workspace {
  typedef typename D::T T;
  T* q;
  float* scores;
  T* weights;
  float* values;  // of the running result
  float* high;
  float* total;
  float* part_values;  // of one segment
  float* part_high;
  float* part_total;
  Group* groups;
  T* wide;  // keys, then values, of a segment in 8-bit floats

  static size_t wide_bytes(const Heads& h) {
    return h.cache == kSame ? 0 : 2 * (long)h.groups_a_segment() * 16 * h.size * sizeof(T) + 128;
  }
  static size_t bytes(const Heads& h) {
    const size_t rows = h.rows_an_item(), lanes = h.groups_a_segment() * 16;
    return wide_bytes(h) + rows * h.size * (sizeof(T) + 8) + rows * lanes * (4 + sizeof(T)) + rows * 16 +
           (h.groups_a_segment() + 4) * sizeof(Group) + 16 * kLine;
  }
  Workspace(char* memory, const Heads& h) {
    const long rows = h.rows_an_item(), lanes = h.groups_a_segment() * 16;
    auto take = [&](size_t bytes) {
      char* p = memory;
      memory += (bytes + kLine - 1) / kLine * kLine;
      return p;
    };
    q = (T*)take(rows * h.size * sizeof(T));
    scores = (float*)take(rows * lanes * 4);
    weights = (T*)take(rows * lanes * sizeof(T));
    values = (float*)take(rows * h.size * 4);
    part_values = (float*)take(rows * h.size * 4);
    high = (float*)take(rows * 4);
    total = (float*)take(rows * 4);
    part_high = (float*)take(rows * 4);
    part_total = (float*)take(rows * 4);
    groups = (Group*)take((h.groups_a_segment() + 4) * sizeof(Group));
    wide = (T*)take(wide_bytes(h));
  }
};

// Adds one segment's row to the running one. A segment that the row cannot see has high = -inf.
static inline void merge_row(float& high, float& total, float* values, float part_high,
                             float part_total, const float* part, int size) {
  if (part_high == -INFINITY) return;
  if (high == -INFINITY) {
    high = part_high;
    total = part_total;
    std::memcpy(values, part, size * 4);
    return;
  }
  const float top = std::max(high, part_high);
  const V16 scales = exp16(_mm512_setr_ps(high - top, part_high - top, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                          0, 0, 0, 0, 0));
  float both[16];
  _mm512_storeu_ps(both, scales);
  const V16 a = _mm512_set1_ps(both[0]), b = _mm512_set1_ps(both[1]);
  for (int i = 0; i < size; i += 16) {
    const V16 sum = _mm512_mul_ps(_mm512_loadu_ps(values + i), a);
    _mm512_storeu_ps(values + i, _mm512_fmadd_ps(_mm512_loadu_ps(part + i), b, sum));
  }
  total = std::fma(part_total, both[1], total * both[0]);
  high = top;
}

template <class D>
static inline void finish_row(float total, float by, const float* values, typename D::T* out,
                              int size) {
  const V16 scale = _mm512_set1_ps(by / total);
  for (int i = 0; i < size; i += 16) {
    D::store(out + i, _mm512_mul_ps(_mm512_loadu_ps(values + i), scale));
  }
}

// Scores of one row -> weights; gives the maximum, scaled, and the sum. The row sees positions
// [low, high).
template <class D>
static inline void soften(float* scores, typename D::T* weights, const Group* groups, int count,
                          int low, int high, const Heads& h, float& top_out, float& total_out) {
  const V16 minus = _mm512_set1_ps(-INFINITY);
  const float score_scale = h.scale * h.key_scale;
  V16 best = minus;
  for (int g = 0; g < count; ++g) {
    V16 s = _mm512_loadu_ps(scores + g * 16);
    const int from = low - groups[g].position;
    const int to = std::min(groups[g].width, high - groups[g].position);
    const bool masked = from > 0 || to < 16;
    if (h.cap != 0) {
      const V16 cap = _mm512_set1_ps(h.cap);
      s = _mm512_div_ps(_mm512_mul_ps(s, _mm512_set1_ps(score_scale)), cap);
      s = _mm512_div_ps(_mm512_mul_ps(cap, tanh16(s)), _mm512_set1_ps(score_scale));
    }
    if (masked) {
      const __mmask16 keep = (to > 0 ? tail_mask(to) : 0) & ~(from > 0 ? tail_mask(from) : 0);
      s = _mm512_mask_mov_ps(minus, keep, s);
    }
    if (masked || h.cap != 0) _mm512_storeu_ps(scores + g * 16, s);
    best = _mm512_max_ps(s, best);
  }
  const float top = max_lanes(best) * score_scale;
  top_out = top;
  if (top == -INFINITY) {
    for (int g = 0; g < count; ++g) D::store(weights + g * 16, _mm512_setzero_ps());
    total_out = 0;
    return;
  }
  const V16 scale = _mm512_set1_ps(score_scale), shift = _mm512_set1_ps(top);
  V16 sum = _mm512_setzero_ps();
  for (int g = 0; g < count; ++g) {
    const V16 s = _mm512_fmsub_ps(_mm512_loadu_ps(scores + g * 16), scale, shift);
    const V16 e = exp_below16<D::kStep == 2>(s);
    sum = _mm512_add_ps(sum, e);
    D::store(weights + g * 16, e);
  }
  total_out = sum_lanes(sum);
}

template <class D>
struct Attention {
  typedef typename D::T T;
  Heads heads;
  Rows rows;
  const T* q;  // [T][stride]
  long q_stride;
  T* out;  // [T][stride]
  long out_stride;
  const void* keys;
  const void* values;

  long item_bytes() const { return heads.cache == kSame ? sizeof(T) : 1; }

  // Puts the groups' numbers, widened, into the workspace, and the groups there.
  void widen(Group* groups, int count, T* wide) const {
    const WidenTable table(heads.cache);
    T* values = wide + (long)heads.groups_a_segment() * 16 * heads.size;
    for (int g = 0; g < count; ++g) {
      const long at = (long)g * 16 * heads.size;
      const int size = groups[g].width * heads.size;
      widen_row<D>(groups[g].key, wide + at, size, table);
      widen_row<D>(groups[g].value, values + at, size, table);
      groups[g].key = (const char*)(wide + at);
      groups[g].value = (const char*)(values + at);
    }
  }

  // Groups of a segment that are visible to positions [low, high).
  int collect(const Item& item, int segment, int low, int high, Group* groups) const {
    const Heads& h = heads;
    const int* table = rows.block_table + item.row * rows.width;
    const int first = segment * h.pages_a_segment();
    const int last = std::min(first + h.pages_a_segment(), (high + h.page - 1) / h.page);
    int count = 0;
    for (int page = first; page < last; ++page) {
      const long offset = ((long)table[page] * h.keys + item.head) * h.page * h.size;
      for (int at = 0; at < h.page; at += 16) {
        Group g;
        g.position = page * h.page + at;
        g.width = std::min(16, h.page - at);
        if (g.position >= high) break;
        if (g.position + g.width <= low) continue;
        g.used = std::min(g.width, high - g.position);
        const long first_byte = (offset + (long)at * h.size) * item_bytes();
        g.key = (const char*)keys + first_byte;
        g.value = (const char*)values + first_byte;
        groups[count++] = g;
      }
    }
    return count;
  }

  void segment(const Item& item, int index, Workspace<D>& w) const {
    const Heads& h = heads;
    const int n = item.tokens * h.group(), lanes = h.groups_a_segment() * 16;
    const int low = h.window ? std::max(0, item.position - h.window + 1) : 0;
    const int high = item.position + item.tokens;
    const int count = collect(item, index, low, high, w.groups);
    if (h.cache != kSame) widen(w.groups, count, w.wide);
    for (int g = count; g < count + 4; ++g) w.groups[g] = w.groups[0];  // prefetched, not read
    in_row_tiles(n, [&](auto r, int first) {
      score_rows<D, r.value>(w.q + (long)first * h.size, h.size, w.groups, count,
                             w.scores + (long)first * lanes, lanes, n <= 12 && first == 0);
    });
    for (int i = 0; i < n; ++i) {
      const int position = item.position + i / h.group();
      soften<D>(w.scores + (long)i * lanes, w.weights + (long)i * lanes, w.groups, count,
                h.window ? position - h.window + 1 : 0, position + 1, h, w.part_high[i],
                w.part_total[i]);
    }
    in_row_tiles(n, [&](auto r, int first) {
      mix_rows<D, r.value>(w.weights + (long)first * lanes, lanes, w.groups, count, h.size,
                           w.part_values + (long)first * h.size);
    });
  }

  void run(const Item& item, char* memory) const {
    const Heads& h = heads;
    const int n = item.tokens * h.group(), group = h.group();
    Workspace<D> w(memory, h);
    for (int i = 0; i < n; ++i) {
      std::memcpy(w.q + (long)i * h.size,
                  q + (item.token + i / group) * q_stride +
                      ((long)item.head * group + i % group) * h.size,
                  h.size * sizeof(T));
      w.high[i] = -INFINITY;
      w.total[i] = 0;
    }
    for (int s = item.first; s < item.last; ++s) {
      segment(item, s, w);
      if (item.part) {
        float* part = item.part + (long)(s - item.first) * n * (h.size + 2);
        std::memcpy(part, w.part_values, (long)n * h.size * 4);
        std::memcpy(part + (long)n * h.size, w.part_high, n * 4);
        std::memcpy(part + (long)n * (h.size + 1), w.part_total, n * 4);
        continue;
      }
      for (int i = 0; i < n; ++i) {
        merge_row(w.high[i], w.total[i], w.values + (long)i * h.size, w.part_high[i],
                  w.part_total[i], w.part_values + (long)i * h.size, h.size);
      }
    }
    if (!item.part) put(item, w);
  }

  void put(const Item& item, const Workspace<D>& w) const {
    const Heads& h = heads;
    for (int i = 0; i < item.tokens * h.group(); ++i) {
      finish_row<D>(w.total[i], h.value_scale, w.values + (long)i * h.size,
                    out + (item.token + i / h.group()) * out_stride +
                        ((long)item.head * h.group() + i % h.group()) * h.size,
                    h.size);
    }
  }

  // Joins the parts of one decode row and head, written by `count` segments' items.
  void join(const Item& item, const float* parts, int count, char* memory) const {
    const Heads& h = heads;
    const int n = item.tokens * h.group();
    Workspace<D> w(memory, h);
    for (int i = 0; i < n; ++i) {
      w.high[i] = -INFINITY;
      w.total[i] = 0;
    }
    for (int s = 0; s < count; ++s) {
      const float* part = parts + (long)s * n * (h.size + 2);
      for (int i = 0; i < n; ++i) {
        merge_row(w.high[i], w.total[i], w.values + (long)i * h.size,
                  part[(long)n * h.size + i], part[(long)n * (h.size + 1) + i],
                  part + (long)i * h.size, h.size);
      }
    }
    put(item, w);
  }
};

struct Join {
  std::atomic<int> left;
  int count;
  float* parts;
};

// The work of a step, the same for all layers of one window: longest items first, so that
// threads end together.
class AttentionPlan {
 public:
  void make(const Heads& h, const Rows& rows, int threads) {
    items_.clear();
    const int piece = h.tokens_a_segment();
    long segments = 0;
    for (int r = 0; r < rows.count; ++r) segments += ceil_div(rows.kv_lens[r], piece);
    const bool split = threads > 1 && (long)rows.count * h.keys < 8L * threads && segments > rows.count;
    long parts = 0;
    int joins = 0;
    for (int r = 0; r < rows.count; ++r) {
      const int start = rows.q_indptr[r], length = rows.q_indptr[r + 1] - start;
      const int before = rows.kv_lens[r] - length;
      for (int t = 0; t < length; t += h.tokens_an_item()) {
        Item item;
        item.row = r;
        item.token = start + t;
        item.position = before + t;
        item.tokens = std::min(h.tokens_an_item(), length - t);
        const int low = h.window ? std::max(0, item.position - h.window + 1) : 0;
        item.first = low / piece;
        item.last = (item.position + item.tokens - 1) / piece + 1;
        item.part = nullptr;
        item.pending = -1;
        for (item.head = 0; item.head < h.keys; ++item.head) {
          const int count = item.last - item.first;
          if (!split || length > 1 || count < 2) {
            item.cost = (long)item.tokens * (item.position + item.tokens - low);
            items_.push_back(item);
            continue;
          }
          for (int s = 0; s < count; ++s) {
            Item one = item;
            one.first = item.first + s;
            one.last = one.first + 1;
            one.pending = joins;
            one.cost = piece;
            one.part = (float*)(parts * sizeof(float));  // an offset until the memory is there
            parts += h.group() * (h.size + 2);
            items_.push_back(one);
          }
          ++joins;
        }
      }
    }
    bind(parts, joins);
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
  }

  int size() const { return (int)items_.size(); }

  template <class D>
  void run(Team& team, const Attention<D>& attention, char* memory, const char* upcoming) {
    team.run(
        size(), true,
        [&](int i) {
          const Item& item = items_[i];
          attention.run(item, memory);
          if (item.pending < 0) return;
          Join& join = joins_[item.pending];
          if (join.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            attention.join(item, join.parts, join.count, memory);
            join.left.store(join.count, std::memory_order_relaxed);  // for the next layer
          }
        },
        [&] {
          if (upcoming)
            for (int i = 0; i < 32768; i += 64) _mm_prefetch(upcoming + i, _MM_HINT_T1);
        });
  }

 private:
  void bind(long parts, int joins) {
    float* memory = parts ? (float*)parts_.reserve(parts * sizeof(float)) : nullptr;
    joins_.reset(joins ? new Join[joins] : nullptr);
    for (int j = 0; j < joins; ++j) {
      joins_[j].count = 0;
      joins_[j].parts = nullptr;
    }
    for (Item& item : items_) {
      if (item.pending < 0) continue;
      item.part = memory + (size_t)item.part / sizeof(float);
      Join& join = joins_[item.pending];
      if (!join.parts) join.parts = item.part;
      ++join.count;
    }
    for (int j = 0; j < joins; ++j) joins_[j].left.store(joins_[j].count);
  }

  std::vector<Item> items_;
  std::unique_ptr<Join[]> joins_;
  Buffer parts_;
};

}  // namespace oct
