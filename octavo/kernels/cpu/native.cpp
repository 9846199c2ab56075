// The C interface of the kernels, called through ctypes (`binding.py`). No torch, no OpenMP.
//
// Shapes as in `octavo/forward.py`. Every function gives 0, or a negative number for what it does
// not have. `dtype` is 0 for f32 and 1 for bf16. Pointers are to contiguous rows unless a stride,
// counted in values, is given.
#include "attention.h"
#include "experts.h"
#include "sample.h"
#include "stack.h"

using namespace oct;

namespace {

constexpr int kNoType = -1;

template <class F>
int with_type(int dtype, F&& f) {
  if (dtype == 0) {
    f(F32());
    return 0;
  }
#ifdef __AVX512BF16__
  if (dtype == 1) {
    f(BF16());
    return 0;
  }
#endif
  return kNoType;
}

// The same with the type of weights: dtype 3 is INT8 weights under bf16 activations.
template <class F>
int with_types(int dtype, F&& f) {
  if (dtype < 2) return with_type(dtype, [&](auto d) { f(d, d); });
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  if (dtype == 3) {
    f(BF16(), INT8());
    return 0;
  }
#endif
  return kNoType;
}

// Runs one phase of `items` alone.
template <class Work>
void each(Pool& pool, int items, Work&& work) {
  std::lock_guard<std::mutex> lock(pool.busy());
  pool.run(1, 0, [&](Team& team) { team.run(items, false, work); });
}

// Rows in runs of about `grain`; work(first, last).
template <class Work>
void each_rows(Pool& pool, int rows, int grain, Work&& work) {
  const int items = (int)ceil_div(rows, grain);
  each(pool, items, [&](int i) { work(i * grain, std::min(rows, (i + 1) * grain)); });
}

}  // namespace

extern "C" {

int oct_int8() {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

int oct_bf16() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

void* oct_pool_new(int threads) { return new Pool(threads); }
void oct_pool_free(void* pool) { delete (Pool*)pool; }

long oct_packed_bytes(int dtype, int rows, int columns) {
  long bytes = kNoType;
  with_types(dtype, [&](auto, auto weight) {
    typedef decltype(weight) W;
    if constexpr (is_quantized<W>()) {
      bytes = quantized_bytes(quantized(nullptr, rows, columns, 8, 0));
    } else {
      const Matrix w = matrix<W>(nullptr, rows, columns);
      bytes = w.panels * w.panel_bytes;
    }
  });
  return bytes;
}

int oct_pack(int dtype, const void* source, long stride, int rows, int columns, void* packed) {
  return with_types(dtype, [&](auto d, auto weight) {
    typedef decltype(d) D;
    typedef typename D::T T;
    if constexpr (std::is_same<D, decltype(weight)>::value) {
      pack<D>((const T*)source, stride, rows, columns, packed);
    } else {
      pack_int8<D>((const T*)source, stride, rows, columns, packed);
    }
  });
}

long oct_packed4_bytes(int rows, int columns, int group) {
  return quantized_bytes(quantized(nullptr, rows, columns, 4, group));
}

// Codes of 0 to 15 u8[rows, columns], scales and zero points f32[rows, columns / group]; groups of
// 32, 64 or 128 columns, which they divide.
int oct_pack4(const void* codes, const float* scales, const float* zeros, int rows, int columns,
              int group, void* packed) {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  if (group % kSummed || kScaled % group || columns % group) return -2;
  pack_int4((const uint8_t*)codes, scales, zeros, rows, columns, group, packed);
  return 0;
#else
  return kNoType;
#endif
}

// y [rows, N] in f32 if `wide`, else in x's type.
int oct_linear(void* pool, int dtype, int wide, const void* x, long stride, int rows,
               const void* packed, int out, int in, const void* bias, void* y) {
  return with_types(dtype, [&](auto d, auto weight) {
    typedef decltype(d) D;
    typedef decltype(weight) W;
    typedef typename D::T T;
    typedef typename W::T X;
    Pool& p = *(Pool*)pool;
    std::lock_guard<std::mutex> lock(p.busy());
    const Matrix w = packed_matrix<W>(packed, out, in);
    static thread_local Buffer copies;
    const X* a = (const X*)x;
    if constexpr (!std::is_same<D, W>::value) {
      const long wider = padded<W>(quantized_row_bytes(in));
      X* copy = (X*)copies.reserve((size_t)rows * wider);
      for (int r = 0; r < rows; ++r) {
        quantize_row<D>((const T*)x + r * stride, copy + r * wider, in);
      }
      a = copy;
      stride = wider;
    } else if (in % D::kStep || (rows > 1 && stride * sizeof(T) % 1024 == 0)) {
      // Rows that end within a step, or that collide in the cache, are copied.
      const long wider = padded<D>(in + 1);
      T* copy = (T*)copies.reserve((size_t)rows * wider * sizeof(T));
      for (int r = 0; r < rows; ++r) {
        std::memcpy(copy + r * wider, a + r * stride, in * sizeof(T));
        copy[r * wider + in] = T(0);
      }
      a = copy;
      stride = wider;
    }
    p.run(1, 0, [&](Team& team) {
      product<W>(team, a, stride, rows, w,
                 [&](int row, int n, int column, int columns, const float* sums, int width) {
                   const T* b = bias ? (const T*)bias + column : nullptr;
                   for (int r = 0; r < n; ++r) {
                     const long at = (long)(row + r) * out + column;
                     if (wide) {
                       put_row<D, F32>(sums + r * width, b, (float*)y + at, columns);
                     } else {
                       put_row<D, D>(sums + r * width, b, (T*)y + at, columns);
                     }
                   }
                 });
    });
  });
}

// Heads by themselves: x, [rows][heads][K] by its strides, and a packed matrix [N, K] of each head
// -> y [rows][heads][N]. K is whole steps.
int oct_apart(void* pool, int dtype, const void* x, long row_stride, long head_stride, int rows,
              const void* packed, long bytes, int heads, int out, int in, void* y) {
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    const int panels = (int)ceil_div(out, kPanel), group = std::min(4, panels);
    const int groups = (int)ceil_div(panels, group), blocks = (int)ceil_div(rows, kBlockRows);
    each(*(Pool*)pool, heads * groups * blocks, [&](int item) {
      const int head = item / (groups * blocks), block = item % blocks;
      const int first = item / blocks % groups * group, count = std::min(group, panels - first);
      const int column = first * kPanel, columns = std::min(count * kPanel, out - column);
      int numbers[kMaxGroup];
      for (int p = 0; p < count; ++p) numbers[p] = first + p;
      const Matrix w = matrix<D>((const char*)packed + head * bytes, out, in);
      multiply<D>((const T*)x + head * head_stride, row_stride, block_start(rows, blocks, block),
                  block_start(rows, blocks, block + 1), w, numbers, count, nullptr,
                  [&](int row, int n, const float* sums, int width) {
                    for (int r = 0; r < n; ++r) {
                      T* to = (T*)y + ((long)(row + r) * heads + head) * out + column;
                      put_row<D, D>(sums + r * width, nullptr, to, columns);
                    }
                  });
    });
  });
}

int oct_embed(void* pool, int dtype, const int* ids, int tokens, const void* packed, int rows,
              int columns, void* y) {
  for (int t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || ids[t] >= rows) return -2;
  }
  return with_types(dtype, [&](auto d, auto weight) {
    typedef decltype(d) D;
    typedef decltype(weight) W;
    const Matrix w = packed_matrix<W>(packed, rows, columns);
    each_rows(*(Pool*)pool, tokens, 16, [&](int first, int last) {
      for (int t = first; t < last; ++t) {
        typename D::T* out = (typename D::T*)y + (long)t * columns;
        if constexpr (std::is_same<D, W>::value) {
          unpack_row<D>(w, ids[t], out);
        } else {
          unpack_row_int8<D>(w, ids[t], out);
        }
      }
    });
  });
}

// With `residual`, `sum` gets x + residual and y the norm of that. With `wide` the weight is in f32.
int oct_rms_norm(void* pool, int dtype, int wide, const void* x, const void* residual,
                 const void* weight, int rows, int size, float eps, void* sum, void* y) {
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    each_rows(*(Pool*)pool, rows, 32, [&](int first, int last) {
      for (long r = first; r < last; ++r) {
        const T* in = (const T*)x + r * size;
        if (residual) {
          T* total = (T*)sum + r * size;
          add_row<D>(in, (const T*)residual + r * size, total, size);
          in = total;
        }
        if (wide) {
          rms_norm_row<D, F32>(in, (const float*)weight, (T*)y + r * size, size, eps);
        } else {
          rms_norm_row<D>(in, (const T*)weight, (T*)y + r * size, size, eps);
        }
      }
    });
  });
}

// x [T, heads, D] -> y
int oct_rope(void* pool, int dtype, const void* x, const int* positions, const float* table,
             int table_rows, int tokens, int heads, int size, void* y) {
  for (int t = 0; t < tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= table_rows) return -2;
  }
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    each_rows(*(Pool*)pool, tokens, 16, [&](int first, int last) {
      for (long t = first; t < last; ++t) {
        for (int h = 0; h < heads; ++h) {
          const long at = (t * heads + h) * size;
          rope_head<D>((const T*)x + at, (T*)y + at, table + (long)positions[t] * size, size);
        }
      }
    });
  });
}

int oct_silu_mul(void* pool, int dtype, const void* x, int rows, int size, void* y) {
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    each_rows(*(Pool*)pool, rows, 16, [&](int first, int last) {
      for (long r = first; r < last; ++r) {
        const T* in = (const T*)x + r * 2 * size;
        silu_mul_row<D>(in, in + size, (T*)y + r * size, size);
      }
    });
  });
}

int oct_gelu_mul(void* pool, int dtype, const void* x, int rows, int size, void* y) {
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    each_rows(*(Pool*)pool, rows, 16, [&](int first, int last) {
      for (long r = first; r < last; ++r) {
        const T* in = (const T*)x + r * 2 * size;
        gelu_mul_row<D>(in, in + size, (T*)y + r * size, size);
      }
    });
  });
}

int oct_expert_bytes() { return (int)sizeof(ExpertShape); }

// x [T, H], chosen experts and their weights [T, top] -> y [T, H]. -2: an expert that is none.
int oct_experts(void* pool, int dtype, const ExpertShape* shape, const void* x, int tokens,
                const int* chosen, const float* weights, void* y) {
  int wrong = 0;
  const int none = with_types(dtype, [&](auto d, auto weight) {
    typedef decltype(d) D;
    typedef typename D::T T;
    Pool& p = *(Pool*)pool;
    std::lock_guard<std::mutex> lock(p.busy());
    static thread_local Experts<D, decltype(weight)> experts;
    wrong = experts.run(p, *shape, (const T*)x, tokens, chosen, weights, (T*)y);
  });
  return none ? none : wrong;
}

int oct_plan_bytes() { return (int)sizeof(Heads); }

// Stores k and v [T, K, D] at their slots, then attends with q [T, Q, D] -> out [T, Q, D].
int oct_attention(void* pool, int dtype, const Heads* heads, const void* q, const void* k,
                  const void* v, int tokens, const int* slots, int rows, const int* q_indptr,
                  const int* kv_lens, const int* block_table, long width, void* keys, void* values,
                  void* out) {
  return with_type(dtype, [&](auto d) {
    typedef decltype(d) D;
    typedef typename D::T T;
    const Heads& h = *heads;
    Pool& p = *(Pool*)pool;
    std::lock_guard<std::mutex> lock(p.busy());
    static thread_local AttentionPlan plan;
    Attention<D> attention;
    attention.heads = h;
    attention.rows = Rows{rows, q_indptr, kv_lens, block_table, width};
    attention.q = (const T*)q;
    attention.out = (T*)out;
    attention.q_stride = attention.out_stride = (long)h.queries * h.size;
    attention.keys = keys;
    attention.values = values;
    plan.make(h, attention.rows, p.size());
    AttentionPlan& shared = plan;
    p.run(2, Workspace<D>::bytes(h), [&](Team& team) {
      team.run((int)ceil_div(tokens, 8), false, [&](int i) {
        for (int t = i * 8; t < std::min(tokens, i * 8 + 8); ++t) {
          for (int head = 0; head < h.keys && slots[t] >= 0; ++head) {
            const long at = ((long)t * h.keys + head) * h.size;
            store_head<D, true>(h, (const T*)k + at, slots[t], head, keys);
            store_head<D, false>(h, (const T*)v + at, slots[t], head, values);
          }
        }
      });
      shared.run<D>(team, attention, p.scratch(team.id), nullptr);
    });
  });
}

// logits f32[S, V] -> tokens i32[S]
int oct_sample(void* pool, const float* logits, int rows, int vocabulary, const float* temperature,
               const int* top_k, const float* top_p, const float* min_p, const int64_t* seed,
               const int64_t* position, int* tokens) {
  Pool& p = *(Pool*)pool;
  std::lock_guard<std::mutex> lock(p.busy());
  bool greedy = true;
  for (int r = 0; r < rows; ++r) greedy = greedy && temperature[r] == 0;
  p.run(1, greedy ? 0 : Sampler::bytes(vocabulary), [&](Team& team) {
    Sampler sampler(p.scratch(team.id), vocabulary);
    team.run(rows, true, [&](int r) {
      const float* row = logits + (long)r * vocabulary;
      if (temperature[r] == 0) {
        tokens[r] = Sampler::greedy(row, vocabulary);
        return;
      }
      const SampleSettings s{temperature[r], top_k[r],          top_p[r],
                             min_p[r],       (uint64_t)seed[r], (uint64_t)position[r]};
      tokens[r] = sampler.choose(row, s);
    });
  });
  return 0;
}

int oct_stack_bytes() { return (int)sizeof(StackShape); }
int oct_step_bytes() { return (int)sizeof(StepArrays); }

void* oct_stack_new(int dtype, const StackShape* shape, const int64_t* layers) {
  void* stack = nullptr;
  with_types(dtype, [&](auto d, auto weight) {
    stack = new Stack<decltype(d), decltype(weight)>(*shape, layers);
  });
  return stack;
}

void oct_stack_free(int dtype, void* stack) {
  with_types(dtype, [&](auto d, auto weight) {
    delete (Stack<decltype(d), decltype(weight)>*)stack;
  });
}

// 0, or what is wrong: -2 ids, -3 positions, -4 slots, -5 rows or pages, -6 sampled rows.
int oct_stack_run(void* pool, int dtype, void* stack, const StepArrays* step) {
  int wrong = 0;
  const int none = with_types(dtype, [&](auto d, auto weight) {
    Pool& p = *(Pool*)pool;
    std::lock_guard<std::mutex> lock(p.busy());
    wrong = ((Stack<decltype(d), decltype(weight)>*)stack)->run(p, *step);
  });
  return none ? none : wrong;
}

}  // extern "C"
