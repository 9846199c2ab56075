// A whole stack of decoder blocks in one call: embedding, blocks, last norm, head.
//
// Phases of a block: norm (by each thread for itself while the batch is small), qkv with rotation
// and storing, attention, output projection with residual, norm, gate and up with activation,
// down with residual. The same row functions as the single kernels, so the same bits.
#pragma once

#include "attention.h"

namespace oct {

struct StackShape {
  int layers, hidden, intermediate, queries, keys, head_size, vocabulary, embedding_rows;
  int page, table_rows;
  float eps, scale, cap;
  int cache;  // a CacheKind
  int64_t table;  // f32 [table_rows, D]
  int64_t embedding, norm, head;
};

// Pointers of a block, as the caller lays them out.
enum LayerField {
  kNorm, kQkv, kQkvBias, kQueryNorm, kKeyNorm, kOutput, kOutputBias,
  kMlpNorm, kGateUp, kGateUpBias, kDown, kDownBias, kWindow,
  kKeyScale, kValueScale, kLayerFields  // bits of floats
};

struct StepArrays {
  int tokens, rows, samples, pages;  // pages: of the cache
  int64_t width;                     // of the block table
  int64_t ids, positions, slots, q_indptr, kv_lens, block_table, sample_rows;
  int64_t keys, values;  // arrays of one pointer a layer
  int64_t logits;        // f32 [S, V], or 0
  int64_t hidden;        // [T, H], or 0: all rows after the last norm
};

// D is the type of activations, W that of weights: D, or INT8.
template <class D, class W>
class Stack {
  typedef typename D::T T;
  typedef typename W::T X;  // what products take
  static constexpr int kOwnNorm = 16;  // most rows that each thread normalizes for itself

  struct Layer {
    const T *norm, *qkv_bias, *query_norm, *key_norm, *output_bias, *mlp_norm, *gate_up_bias,
        *down_bias;
    Matrix qkv, output, gate_up, down;
    int window;
    float key_scale, value_scale;
    int plan;
  };

 public:
  Stack(const StackShape& shape, const int64_t* fields) : s_(shape) {
    const int q = s_.queries * s_.head_size, kv = s_.keys * s_.head_size;
    for (int i = 0; i < s_.layers; ++i, fields += kLayerFields) {
      Layer l;
      l.norm = (const T*)fields[kNorm];
      l.qkv = packed_matrix<W>((const void*)fields[kQkv], q + 2 * kv, s_.hidden);
      l.qkv_bias = (const T*)fields[kQkvBias];
      l.query_norm = (const T*)fields[kQueryNorm];
      l.key_norm = (const T*)fields[kKeyNorm];
      l.output = packed_matrix<W>((const void*)fields[kOutput], s_.hidden, q);
      l.output_bias = (const T*)fields[kOutputBias];
      l.mlp_norm = (const T*)fields[kMlpNorm];
      l.gate_up = packed_matrix<W>((const void*)fields[kGateUp], 2 * s_.intermediate, s_.hidden);
      l.gate_up_bias = (const T*)fields[kGateUpBias];
      l.down = packed_matrix<W>((const void*)fields[kDown], s_.hidden, s_.intermediate);
      l.down_bias = (const T*)fields[kDownBias];
      l.window = (int)fields[kWindow];
      std::memcpy(&l.key_scale, &fields[kKeyScale], 4);
      std::memcpy(&l.value_scale, &fields[kValueScale], 4);
      l.plan = 0;
      while (l.plan < (int)windows_.size() && windows_[l.plan] != l.window) ++l.plan;
      if (l.plan == (int)windows_.size()) windows_.push_back(l.window);
      layers_.push_back(l);
    }
    plans_ = std::vector<AttentionPlan>(windows_.size());
    embedding_ = packed_matrix<W>((const void*)s_.embedding, s_.embedding_rows, s_.hidden);
    head_ = packed_matrix<W>((const void*)s_.head, s_.vocabulary, s_.hidden);
    hidden_stride_ = padded<D>(s_.hidden + 1);
    query_stride_ = padded<D>(q + 1);
    middle_stride_ = padded<D>(s_.intermediate + 1);
    qkv_stride_ = padded<D>(q + 2 * kv);
    gate_up_stride_ = padded<D>(2 * s_.intermediate);
    const int widest = std::max(std::max(s_.hidden, q), s_.intermediate);
    input_stride_ = padded<W>(quantized_row_bytes(widest));
  }

  int run(Pool& pool, const StepArrays& step) {
    const int wrong = check(step);
    if (wrong) return wrong;
    reserve(std::max(step.tokens, 1), std::max(step.samples, 1));
    const Rows rows{step.rows, (const int*)step.q_indptr, (const int*)step.kv_lens,
                    (const int*)step.block_table, (long)step.width};
    for (size_t i = 0; i < windows_.size(); ++i) {
      plans_[i].make(heads(windows_[i]), rows, pool.size());
    }
    const size_t own = (size_t)kOwnNorm * (hidden_stride_ * sizeof(T) + input_stride_) + 4096;
    pool.run(11 * s_.layers + 8, own + Workspace<D>::bytes(heads(0)), [&](Team& team) {
      T* mine = (T*)pool.scratch(team.id);
      body(team, step, rows, mine, pool.scratch(team.id) + own / kLine * kLine);
    });
    return 0;
  }

 private:
  Heads heads(int window, float key_scale = 1, float value_scale = 1) const {
    return Heads{s_.queries, s_.keys, s_.head_size, s_.page,   s_.scale,
                 s_.cap,     window,  s_.cache,     key_scale, value_scale};
  }

  int check(const StepArrays& step) const {
    const int* ids = (const int*)step.ids;
    const int* positions = (const int*)step.positions;
    const int* slots = (const int*)step.slots;
    for (int t = 0; t < step.tokens; ++t) {
      if (ids[t] < 0 || ids[t] >= s_.embedding_rows) return -2;
      if (positions[t] < 0 || positions[t] >= s_.table_rows) return -3;
      if (slots[t] >= (long)step.pages * s_.page) return -4;
    }
    const int* starts = (const int*)step.q_indptr;
    const int* lens = (const int*)step.kv_lens;
    if (step.rows && (starts[0] != 0 || starts[step.rows] != step.tokens)) return -5;
    for (int r = 0; r < step.rows; ++r) {
      const int length = starts[r + 1] - starts[r];
      if (length < 0 || lens[r] < length || lens[r] > step.width * s_.page) return -5;
      const int* table = (const int*)step.block_table + r * step.width;
      for (int b = 0; b < ceil_div(lens[r], s_.page); ++b) {
        if (table[b] < 0 || table[b] >= step.pages) return -5;
      }
    }
    const int* sampled = (const int*)step.sample_rows;
    for (int i = 0; i < step.samples; ++i) {
      if (sampled[i] < 0 || sampled[i] >= step.tokens) return -6;
    }
    return 0;
  }

  void reserve(long tokens, long samples) {
    hidden_ = (T*)memory_[0].reserve(tokens * hidden_stride_ * sizeof(T));
    normed_ = (T*)memory_[1].reserve(std::max(tokens, samples) * hidden_stride_ * sizeof(T));
    query_ = (T*)memory_[2].reserve(tokens * query_stride_ * sizeof(T));
    mixed_ = (T*)memory_[3].reserve(tokens * query_stride_ * sizeof(T));
    middle_ = (T*)memory_[4].reserve(tokens * middle_stride_ * sizeof(T));
    if (is_quantized<W>()) {
      input_ = (X*)memory_[7].reserve(std::max(tokens, samples) * input_stride_ * sizeof(X));
    }
    if (!whole_heads()) qkv_ = (T*)memory_[5].reserve(tokens * qkv_stride_ * sizeof(T));
    if (!whole_middle())
      gate_up_ = (T*)memory_[6].reserve(tokens * gate_up_stride_ * sizeof(T));
  }

  bool whole_heads() const {
    return s_.head_size % kPanel == 0 && s_.head_size / kPanel <= kMaxGroup;
  }
  bool whole_middle() const { return s_.intermediate % kPanel == 0; }

  void body(Team& team, const StepArrays& step, const Rows& rows, T* mine, char* memory) {
    const int tokens = step.tokens;
    const int* ids = (const int*)step.ids;
    each(team, tokens, [&](long t) { embed(ids[t], hidden_ + t * hidden_stride_); });
    for (int i = 0; i < s_.layers; ++i) {
      const Layer& l = layers_[i];
      void* keys = (void*)((const int64_t*)step.keys)[i];
      void* values = (void*)((const int64_t*)step.values)[i];
      Input x = normalize(team, l.norm, tokens, mine);
      project(team, l, x, step, keys, values);
      Attention<D> attention{heads(l.window, l.key_scale, l.value_scale), rows, query_, query_stride_, mixed_, query_stride_,
                             keys, values};
      plans_[l.plan].template run<D>(team, attention, memory, share(team, l.output));
      x = prepare(team, mixed_, query_stride_, tokens, s_.queries * s_.head_size, mine);
      add(team, x, tokens, l.output, l.output_bias);
      x = normalize(team, l.mlp_norm, tokens, mine);
      activate(team, l, x, tokens);
      x = prepare(team, middle_, middle_stride_, tokens, s_.intermediate, mine);
      add(team, x, tokens, l.down, l.down_bias);
    }
    finish(team, step, mine);
  }

  // Where this thread's share of a matrix begins.
  const char* share(const Team& team, const Matrix& w) const {
    return w.panel((int)((long)w.panels * team.id / team.size));
  }

  template <class Work>
  void each(Team& team, int rows, Work&& work) {
    const int grain = std::max(1, std::min(16, rows / (2 * team.size)));
    team.run((int)ceil_div(rows, grain), false, [&](int i) {
      for (int r = i * grain; r < std::min(rows, (i + 1) * grain); ++r) work(r);
    });
  }

  // Rows as a product takes them.
  struct Input {
    const X* rows;
    long stride;
  };

  void embed(int id, T* out) const {
#ifdef __AVX512VNNI__
    if constexpr (is_quantized<W>()) return unpack_row_int8<D>(embedding_, id, out);
#endif
    if constexpr (!is_quantized<W>()) unpack_row<D>(embedding_, id, out);
  }

  Input normalize(Team& team, const T* weight, int tokens, T* mine) {
    if (tokens <= kOwnNorm) {
      for (int t = 0; t < tokens; ++t) norm_row(t, weight, mine + t * hidden_stride_);
      return own_input(mine, hidden_stride_, tokens, s_.hidden, mine);
    }
    each(team, tokens, [&](long t) {
      norm_row(t, weight, normed_ + t * hidden_stride_);
      quantize(normed_ + t * hidden_stride_, s_.hidden, t);
    });
    return shared_input(normed_, hidden_stride_);
  }

  // Rows of `size` values for a product: as they are, or in 8 bits, by each thread for itself
  // while they are few.
  Input prepare(Team& team, const T* x, long stride, int tokens, int size, T* mine) {
    if (is_quantized<W>() && tokens <= kOwnNorm) return own_input(x, stride, tokens, size, mine);
    if (is_quantized<W>()) each(team, tokens, [&](long t) { quantize(x + t * stride, size, t); });
    return shared_input(x, stride);
  }

  Input own_input(const T* x, long stride, int tokens, int size, T* mine) const {
#ifdef __AVX512VNNI__
    if constexpr (is_quantized<W>()) {
      X* out = (X*)(mine + kOwnNorm * hidden_stride_);
      for (int t = 0; t < tokens; ++t) quantize_row<D>(x + t * stride, out + t * input_stride_, size);
      return Input{out, input_stride_};
    }
#endif
    if constexpr (!is_quantized<W>()) return Input{x, stride};
  }

  void quantize(const T* x, int size, long t) {
#ifdef __AVX512VNNI__
    if constexpr (is_quantized<W>()) quantize_row<D>(x, input_ + t * input_stride_, size);
#endif
  }

  Input shared_input(const T* x, long stride) const {
    if constexpr (is_quantized<W>()) {
      return Input{input_, input_stride_};
    } else {
      return Input{x, stride};
    }
  }

  void norm_row(long t, const T* weight, T* out) const {
    rms_norm_row<D>(hidden_ + t * hidden_stride_, weight, out, s_.hidden, s_.eps);
  }

  // Queries, keys and values of one token and head, out of the projection.
  void place(const Layer& l, const StepArrays& step, long t, int head, T* x, void* keys,
             void* values) {
    const int size = s_.head_size;
    const float* row = (const float*)s_.table + ((const int*)step.positions)[t] * (long)size;
    const int slot = ((const int*)step.slots)[t];
    if (head < s_.queries) {
      if (l.query_norm) rms_norm_row<D>(x, l.query_norm, x, size, s_.eps);
      rope_head<D>(x, query_ + t * query_stride_ + (long)head * size, row, size);
      return;
    }
    if (slot < 0) return;
    const int key_head = (head - s_.queries) % s_.keys;
    const Heads h = heads(l.window, l.key_scale, l.value_scale);
    if (head < s_.queries + s_.keys) {
      if (l.key_norm) rms_norm_row<D>(x, l.key_norm, x, size, s_.eps);
      rope_head<D>(x, x, row, size);
      store_head<D, true>(h, x, slot, key_head, keys);
    } else {
      store_head<D, false>(h, x, slot, key_head, values);
    }
  }

  void project(Team& team, const Layer& l, const Input& x, const StepArrays& step, void* keys,
               void* values) {
    const int size = s_.head_size, count = s_.queries + 2 * s_.keys, tokens = step.tokens;
    if (!whole_heads()) {
      product<W>(team, x.rows, x.stride, tokens, l.qkv,
                 [&](int row, int n, int column, int columns, const float* sums, int width) {
                   for (int r = 0; r < n; ++r) {
                     put_row<D, D>(sums + r * width, l.qkv_bias ? l.qkv_bias + column : nullptr,
                                   qkv_ + (row + r) * qkv_stride_ + column, columns);
                   }
                 });
      each(team, tokens, [&](long t) {
        for (int h = 0; h < count; ++h) {
          place(l, step, t, h, qkv_ + t * qkv_stride_ + (long)h * size, keys, values);
        }
      });
      return;
    }
    const int group = size / kPanel, blocks = (int)ceil_div(tokens, kBlockRows);
    team.run(count * blocks, false, [&](int item) {
      const int head = item / blocks, block = item % blocks;
      int panels[kMaxGroup];
      for (int p = 0; p < group; ++p) panels[p] = head * group + p;
      const T* bias = l.qkv_bias ? l.qkv_bias + (long)head * size : nullptr;
      multiply<W>(x.rows, x.stride, block_start(tokens, blocks, block),
                  block_start(tokens, blocks, block + 1), l.qkv, panels, group,
                  block + 1 < blocks ? nullptr : l.qkv.panel((head + 1) * group),
                  [&](int row, int n, const float* sums, int width) {
                    alignas(64) T values_of_head[kMaxGroup * kPanel];
                    for (int r = 0; r < n; ++r) {
                      put_row<D, D>(sums + r * width, bias, values_of_head, size);
                      place(l, step, row + r, head, values_of_head, keys, values);
                    }
                  });
    });
  }

  // hidden += round(x w^T + bias)
  void add(Team& team, const Input& x, int tokens, const Matrix& w, const T* bias) {
    product<W>(team, x.rows, x.stride, tokens, w,
               [&](int row, int n, int column, int columns, const float* sums, int width) {
                 for (int r = 0; r < n; ++r) {
                   add_sums<D>(sums + r * width, bias ? bias + column : nullptr,
                               hidden_ + (row + r) * hidden_stride_ + column, columns);
                 }
               });
  }

  // middle = silu(gate) * up
  void activate(Team& team, const Layer& l, const Input& x, int tokens) {
    const int size = s_.intermediate;
    if (!whole_middle()) {
      product<W>(team, x.rows, x.stride, tokens, l.gate_up,
                 [&](int row, int n, int column, int columns, const float* sums, int width) {
                   const T* bias = l.gate_up_bias ? l.gate_up_bias + column : nullptr;
                   for (int r = 0; r < n; ++r) {
                     put_row<D, D>(sums + r * width, bias,
                                   gate_up_ + (row + r) * gate_up_stride_ + column, columns);
                   }
                 });
      each(team, tokens, [&](long t) {
        const T* row = gate_up_ + t * gate_up_stride_;
        silu_mul_row<D>(row, row + size, middle_ + t * middle_stride_, size);
      });
      return;
    }
    const int half = size / kPanel;
    const int group = tokens <= kSmallRows ? 1 : 2;
    const int groups = (int)ceil_div(half, group), blocks = (int)ceil_div(tokens, kBlockRows);
    team.run(groups * blocks, false, [&](int item) {
      const int first = item / blocks * group, block = item % blocks;
      const int count = std::min(group, half - first), width = count * kPanel;
      int panels[4];
      for (int p = 0; p < count; ++p) {
        panels[p] = first + p;
        panels[count + p] = half + first + p;
      }
      const T* bias = l.gate_up_bias;
      const int column = first * kPanel;
      multiply<W>(x.rows, x.stride, block_start(tokens, blocks, block),
                  block_start(tokens, blocks, block + 1), l.gate_up, panels, 2 * count,
                  block + 1 < blocks ? nullptr : l.gate_up.panel(first + count),
                  [&](int row, int n, const float* sums, int stride) {
                    for (int r = 0; r < n; ++r) {
                      const float* from = sums + r * stride;
                      silu_mul_sums<D>(from, from + width, bias ? bias + column : nullptr,
                                       bias ? bias + size + column : nullptr,
                                       middle_ + (row + r) * middle_stride_ + column, width);
                    }
                  });
    });
  }

  void finish(Team& team, const StepArrays& step, T* mine) {
    const T* weight = (const T*)s_.norm;
    if (step.hidden) {
      each(team, step.tokens, [&](long t) { norm_row(t, weight, (T*)step.hidden + t * s_.hidden); });
    }
    if (!step.logits || !step.samples) return;
    const int* sampled = (const int*)step.sample_rows;
    each(team, step.samples, [&](long i) {
      norm_row(sampled[i], weight, normed_ + i * hidden_stride_);
    });
    const Input x = prepare(team, normed_, hidden_stride_, step.samples, s_.hidden, mine);
    float* logits = (float*)step.logits;
    product<W>(team, x.rows, x.stride, step.samples, head_,
               [&](int row, int n, int column, int columns, const float* sums, int width) {
                 for (int r = 0; r < n; ++r) {
                   put_row<D, F32>(sums + r * width, nullptr,
                                   logits + (long)(row + r) * s_.vocabulary + column, columns);
                 }
               });
  }

  StackShape s_;
  std::vector<Layer> layers_;
  std::vector<int> windows_;
  std::vector<AttentionPlan> plans_;
  Matrix embedding_, head_;
  long hidden_stride_, query_stride_, middle_stride_, qkv_stride_, gate_up_stride_,
      input_stride_;
  Buffer memory_[8];
  T *hidden_ = nullptr, *normed_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
    *middle_ = nullptr, *qkv_ = nullptr, *gate_up_ = nullptr;
  X* input_ = nullptr;
};

}  // namespace oct
