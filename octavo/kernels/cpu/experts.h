// Routed experts: each token's gated MLPs, weighted and added up, as two products of sorted tokens.
//
// An expert is two packed matrices. The panels of gate and up take turns in the first, so that both
// stream as one; weights of experts that no token chose are not read. A token's result is summed in
// the order of its experts' numbers, and each product is one chain of sums, so that it is the same
// bits in any batch. Not for: routing.
#pragma once

#include "rows.h"

namespace oct {

struct ExpertShape {
  int experts, hidden, width, top;
  int64_t gate_up, down;              // the packed matrices of expert 0
  int64_t gate_up_bytes, down_bytes;  // from one expert to the next
  // Biases, or 0: [E][2][whole panels] of gate and up, [E][H]. With them the gate is a clamped one.
  int64_t gate_up_bias, down_bias;
  float alpha, limit;
};

// D is the type of activations, W that of weights: D, or INT8.
template <class D, class W>
class Experts {
  typedef typename D::T T;
  typedef typename W::T X;
  // Of down that an item takes of each expert: panels lie apart by experts, so that fewer would
  // be too short to stream, and more would not stay in a near cache for the next rows.
  static constexpr long kStretch = 512 << 10;
  static constexpr int kMostPairs = 8192;  // of token and expert, worked on together

  struct Item {
    int expert, first, last;  // pairs
    int panel, count;         // of gate, and as many of up
  };

 public:
  // x [tokens, H], chosen and weights [tokens, top] -> out [tokens, H]. 0, or -2 for a wrong expert.
  int run(Pool& pool, const ExpertShape& shape, const T* x, int tokens, const int* chosen,
          const float* weights, T* out) {
    for (long i = 0; i < (long)tokens * shape.top; ++i) {
      if (chosen[i] < 0 || chosen[i] >= shape.experts) return -2;
    }
    s_ = shape;
    half_ = (int)ceil_div(s_.width, kPanel);
    input_stride_ = stride_of(s_.hidden);
    inner_stride_ = padded<D>(half_ * kPanel);
    middle_stride_ = is_quantized<W>() ? stride_of(s_.width) : inner_stride_;
    const int most = std::max(1, kMostPairs / s_.top);
    for (int first = 0; first < tokens; first += most) {
      const long at = (long)first * s_.top;
      some(pool, x + (long)first * s_.hidden, std::min(most, tokens - first), chosen + at,
           weights + at, out + (long)first * s_.hidden);
    }
    return 0;
  }

 private:
  // Of a row that a product takes: filled up to a whole step, with scales behind it in 8 bits.
  static long stride_of(int size) {
    return is_quantized<W>() ? padded<W>(quantized_row_bytes(size)) : padded<W>(size + 1);
  }

  Matrix gate_up(int expert) const {
    return packed_matrix<W>((const char*)s_.gate_up + expert * s_.gate_up_bytes, 2 * half_ * kPanel,
                     s_.hidden);
  }
  Matrix down(int expert) const {
    return packed_matrix<W>((const char*)s_.down + expert * s_.down_bytes, s_.hidden, s_.width);
  }

  void some(Pool& pool, const T* x, int tokens, const int* chosen, const float* weights, T* out) {
    sort(tokens, chosen);
    const long pairs = (long)tokens * s_.top;
    X* input = (X*)memory_[0].reserve((tokens == 1 ? 1 : pairs) * input_stride_ * sizeof(X));
    T* inner = (T*)memory_[1].reserve(pairs * inner_stride_ * sizeof(T));
    X* middle = (X*)inner;
    if (is_quantized<W>()) middle = (X*)memory_[2].reserve(pairs * middle_stride_ * sizeof(X));
    float* sums = (float*)memory_[3].reserve((long)tokens * s_.hidden * sizeof(float));
    const long stride = tokens == 1 ? 0 : input_stride_;  // a token alone is its experts' one row
    cut_items(pool.size());
    pool.run(4, 0, [&](Team& team) {
      each(team, tokens == 1 ? 1 : pairs, [&](long i) {
        const T* from = x + (long)(tokens == 1 ? 0 : order_[i] / s_.top) * s_.hidden;
        take<D>(from, input + i * input_stride_, s_.hidden);
      });
      team.run((int)items_.size(), false, [&](int i) {
        activate(items_[i], input, stride, inner, i + 1 < (int)items_.size() ? &items_[i + 1] : nullptr);
      });
      if (is_quantized<W>()) {
        each(team, pairs, [&](long i) {
          take<D>(inner + i * inner_stride_, middle + i * middle_stride_, s_.width);
        });
      }
      project(team, tokens, middle, weights, sums, out);
    });
  }

  // Pairs by expert, and by token within one.
  void sort(int tokens, const int* chosen) {
    const int pairs = tokens * s_.top;
    starts_.assign(s_.experts + 1, 0);
    for (int i = 0; i < pairs; ++i) ++starts_[chosen[i] + 1];
    used_.clear();
    for (int e = 0; e < s_.experts; ++e) {
      if (starts_[e + 1]) used_.push_back(e);
      starts_[e + 1] += starts_[e];
    }
    next_.assign(starts_.begin(), starts_.end());
    order_.resize(pairs);
    for (int i = 0; i < pairs; ++i) order_[next_[chosen[i]]++] = i;
  }

  void cut_items(int threads) {
    items_.clear();
    for (const int e : used_) {
      const int rows = starts_[e + 1] - starts_[e];
      const int group = rows <= kSmallRows ? 1 : 2;
      const int blocks = (int)ceil_div(rows, kBlockRows);
      for (int panel = 0; panel < half_; panel += group) {
        for (int b = 0; b < blocks; ++b) {
          items_.push_back(Item{e, starts_[e] + block_start(rows, blocks, b),
                                starts_[e] + block_start(rows, blocks, b + 1), panel,
                                std::min(group, half_ - panel)});
        }
      }
    }
  }

  template <class Work>
  void each(Team& team, long rows, Work&& work) {
    const long grain = std::max(1L, std::min(16L, rows / (2 * team.size)));
    team.run((int)ceil_div(rows, grain), false, [&](int i) {
      for (long r = i * grain; r < std::min(rows, (i + 1) * grain); ++r) work(r);
    });
  }

  template <class A>
  static void take(const typename A::T* from, X* to, int size) {
#ifdef __AVX512VNNI__
    if constexpr (is_quantized<W>()) return quantize_row<A>(from, to, size);
#endif
    if constexpr (!is_quantized<W>()) {
      std::memcpy(to, from, size * sizeof(X));
      to[size] = X(0);
    }
  }

  // inner = silu(gate) * up. Columns past the width come out as 0, since gate is 0 there.
  void activate(const Item& item, const X* input, long stride, T* inner, const Item* then) const {
    const Matrix w = gate_up(item.expert);
    int panels[4];
    for (int p = 0; p < item.count; ++p) {
      panels[p] = 2 * (item.panel + p);
      panels[item.count + p] = panels[p] + 1;
    }
    const int width = item.count * kPanel;
    const char* after = then ? gate_up(then->expert).panel(2 * then->panel) : nullptr;
    if (then && then->expert != item.expert) fetch(after);
    const T* bias = (const T*)s_.gate_up_bias;
    if (bias) bias += (2L * item.expert * half_ + item.panel) * kPanel;
    multiply<W>(input, stride, item.first, item.last, w, panels, 2 * item.count, after,
                [&](int row, int n, const float* sums, int sums_stride) {
                  for (int r = 0; r < n; ++r) {
                    const float* from = sums + r * sums_stride;
                    T* to = inner + (row + r) * inner_stride_ + item.panel * kPanel;
                    if (bias) {
                      clamped_mul_sums<D>(from, from + width, bias, bias + half_ * kPanel, to, width,
                                          s_.alpha, s_.limit);
                    } else {
                      silu_mul_sums<D>(from, from + width, nullptr, nullptr, to, width);
                    }
                  }
                });
  }

  // A few columns of the result at a time: all experts' shares in them are added up in order.
  void project(Team& team, int tokens, const X* middle, const float* weights, float* sums, T* out) {
    const int panels = (int)ceil_div(s_.hidden, kPanel);
    int group = (int)std::max(1L, std::min(8L, kStretch / down(0).panel_bytes));
    while (group > 1 && ceil_div(panels, group) < 4 * team.size) --group;
    team.run((int)ceil_div(panels, group), false, [&](int item) {
      const int first = item * group, count = std::min(group, panels - first);
      const int column = first * kPanel, columns = std::min(count * kPanel, s_.hidden - column);
      for (int t = 0; t < tokens; ++t) {
        std::memset(sums + (long)t * s_.hidden + column, 0, columns * sizeof(float));
      }
      int numbers[kMaxGroup];
      for (int p = 0; p < count; ++p) numbers[p] = first + p;
      for (size_t i = 0; i < used_.size(); ++i) {
        const int e = used_[i];
        const Matrix w = down(e);
        const bool last = i + 1 == used_.size();
        const char* after =
            last ? down(used_[0]).panel(first + count) : down(used_[i + 1]).panel(first);
        if (starts_[e + 1] - starts_[e] <= kTileRows) fetch(after);
        const T* bias = (const T*)s_.down_bias;
        if (bias) bias += (long)e * s_.hidden + column;
        multiply<W>(middle, middle_stride_, starts_[e], starts_[e + 1], w, numbers, count, after,
                    [&](int row, int n, const float* part, int stride) {
                      for (int r = 0; r < n; ++r) {
                        const int pair = order_[row + r];
                        add_scaled(part + r * stride, bias, weights[pair],
                                   sums + (long)(pair / s_.top) * s_.hidden + column, columns);
                      }
                    });
      }
      for (long t = 0; t < tokens; ++t) {
        const long at = t * s_.hidden + column;
        put_row<D, D>(sums + at, nullptr, out + at, columns);
      }
    });
  }

  // The beginning of what is read next: a product fetches ahead by as much, but on its own panel.
  static void fetch(const char* from) {
    for (long i = 0; i < kAhead; i += kLine) _mm_prefetch(from + i, _MM_HINT_T1);
  }

  // Rounded between product and sum, as if the two were apart.
  static void add_scaled(const float* part, const T* bias, float weight, float* to, int columns) {
    const V16 scale = _mm512_set1_ps(weight);
    for (int c = 0; c < columns; c += 16) {
      const __mmask16 m = tail_mask(columns - c);
      const V16 share = _mm512_mul_ps(result16<D>(part, bias, c, m), scale);
      F32::store(to + c, _mm512_add_ps(F32::load(to + c, m), share), m);
    }
  }

  ExpertShape s_{};
  int half_ = 0;  // panels of gate
  long input_stride_ = 0, inner_stride_ = 0, middle_stride_ = 0;
  std::vector<int> starts_, next_, order_, used_;
  std::vector<Item> items_;
  Buffer memory_[4];
};

}  // namespace oct
