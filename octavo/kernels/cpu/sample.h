// Choice of one token from a row of logits; `octavo/kernels/sample.py` is the definition.
//
// Weights and their sums are f64, so that the order of sums cannot change a choice but by chance
// of 1e-12. Filters find their thresholds by counting, not by sorting. Next file: stack.h.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"

namespace oct {

struct SampleSettings {
  float temperature;
  int top_k;
  float top_p;
  float min_p;
  uint64_t seed;
  uint64_t position;
};

static inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Uniform in [0, 1), a function of seed and position (SplitMix64 of Steele et al. 2014, twice).
static inline double uniform(uint64_t seed, uint64_t position) {
  const uint64_t golden = 0x9e3779b97f4a7c15ull;
  const uint64_t bits = mix64(mix64(seed + golden) + golden * (position + 1));
  return (double)(bits >> 11) * 0x1p-53;
}

typedef __m512d V8;  // 8 f64 lanes

// exp(x) for x <= 0, to about 1e-15; 0 below -700.
static inline V8 exp8(V8 x) {
  const __mmask8 under = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-700.0), _CMP_LT_OQ);
  const V8 n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 8);
  V8 r = _mm512_fnmadd_pd(n, _mm512_set1_pd(6.93147180369123816490e-01), x);
  r = _mm512_fnmadd_pd(n, _mm512_set1_pd(1.90821492927058770002e-10), r);
  static const double c[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                             1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                             1.0 / 24,        1.0 / 6,        0.5,           1.0,
                             1.0};
  V8 p = _mm512_set1_pd(c[0]);
#pragma GCC unroll 12
  for (int i = 1; i < 13; ++i) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(c[i]));
  return _mm512_mask_mov_pd(_mm512_scalef_pd(p, n), under, _mm512_setzero_pd());
}

static inline int first_equal(const float* x, int size, float value) {
  const V16 v = _mm512_set1_ps(value);
  for (int i = 0; i < size; i += 16) {
    const __mmask16 m = tail_mask(size - i);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(m, _mm512_loadu_ps(x + i), v, _CMP_EQ_OQ);
    if (hit) return i + __builtin_ctz(hit);
  }
  return 0;
}

// Tokens as values and weights; `size` is a multiple of 8, filled up with (-inf, 0).
struct Tokens {
  float* z;
  double* weight;
  int size;

  // How many have low <= z, or what they weigh; lanes and then blocks are added in order.
  double amount(float low, bool weighed) const {
    return weighed ? mass(0, size, low) : count(low);
  }
  double mass(int first, int last, float low) const {
    const __m256 bound = _mm256_set1_ps(low);
    V8 sum = _mm512_setzero_pd();
    for (int i = first; i < last; i += 8) {
      const __mmask8 m = _mm256_cmp_ps_mask(_mm256_loadu_ps(z + i), bound, _CMP_GE_OQ);
      sum = _mm512_mask_add_pd(sum, m, sum, _mm512_loadu_pd(weight + i));
    }
    return _mm512_reduce_add_pd(sum);
  }
  double count(float low) const {
    const __m256 bound = _mm256_set1_ps(low);
    long n = 0;
    for (int i = 0; i < size; i += 8) {
      n += __builtin_popcount(_mm256_cmp_ps_mask(_mm256_loadu_ps(z + i), bound, _CMP_GE_OQ));
    }
    return (double)n;
  }
  // Copies those with low <= z < high to `to`, which may be this: writing never overtakes reading.
  void narrow(float low, float high, Tokens& to) const {
    const __m256 a = _mm256_set1_ps(low), b = _mm256_set1_ps(high);
    const int end = size;
    int n = 0;
    for (int i = 0; i < end; i += 8) {
      const __m256 v = _mm256_loadu_ps(z + i);
      const V8 w = _mm512_loadu_pd(weight + i);
      const __mmask8 m =
          _mm256_cmp_ps_mask(v, a, _CMP_GE_OQ) & _mm256_cmp_ps_mask(v, b, _CMP_LT_OQ);
      _mm256_storeu_ps(to.z + n, _mm256_maskz_compress_ps(m, v));
      _mm512_storeu_pd(to.weight + n, _mm512_maskz_compress_pd(m, w));
      n += __builtin_popcount(m);
    }
    for (; n % 8; ++n) {
      to.z[n] = -INFINITY;
      to.weight[n] = 0;
    }
    to.size = n;
  }
};

// One row's work; buffers are reused from row to row.
class Sampler {
 public:
  static size_t bytes(int vocabulary) { return 3 * (size_t)(vocabulary + 64) * 12; }

  Sampler(char* memory, int vocabulary) : vocabulary_(vocabulary) {
    const int size = (vocabulary + 15) / 16 * 16;
    for (Tokens* tokens : {&all_, &kept_, &near_}) {
      tokens->weight = (double*)memory;
      tokens->z = (float*)(memory + (size_t)(size + 8) * 8);
      tokens->size = size;
      memory += (size_t)(vocabulary + 64) * 12 / kLine * kLine;
    }
  }

  int choose(const float* logits, const SampleSettings& s) {
    const float top = scale(logits, s.temperature);
    if (!(top > -INFINITY && top < INFINITY)) return 0;
    weigh(top);
    const Tokens* left = &all_;
    float low = -INFINITY;
    if (s.min_p > 0) {
      low = least_of_weight(s.min_p);
      left->narrow(low, INFINITY, kept_);
      left = &kept_;
    }
    if (s.top_k > 0 && s.top_k < vocabulary_) {
      low = std::max(low, threshold(*left, top, s.top_k, false));
      left->narrow(low, INFINITY, kept_);
      left = &kept_;
    }
    if (s.top_p < 1) {
      const double wanted = (double)s.top_p * left->mass(0, left->size, -INFINITY);
      low = std::max(low, threshold(*left, top, wanted, true));
    }
    return draw(uniform(s.seed, s.position), low, top);
  }

  // First maximum without a copy; 0 if it is not finite or a NaN is among them.
  static int greedy(const float* x, int size) {
    V16 best = _mm512_set1_ps(-INFINITY);
    __mmask16 bad = 0;
    for (int i = 0; i < size; i += 16) {
      const __mmask16 m = tail_mask(size - i);
      const V16 v = _mm512_mask_loadu_ps(best, m, x + i);
      bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      best = _mm512_max_ps(best, v);
    }
    const float top = max_lanes(best);
    if (bad || !(top > -INFINITY && top < INFINITY)) return 0;
    return first_equal(x, size, top);
  }

 private:
  // z = logits / temperature; gives the maximum, or NaN if any is.
  float scale(const float* logits, float temperature) {
    const V16 divisor = _mm512_set1_ps(temperature);
    const V16 minus = _mm512_set1_ps(-INFINITY);
    V16 best = minus;
    __mmask16 bad = 0;
    for (int i = 0; i < all_.size; i += 16) {
      const __mmask16 m = tail_mask(vocabulary_ - i);
      const V16 v = _mm512_mask_div_ps(minus, m, _mm512_maskz_loadu_ps(m, logits + i), divisor);
      bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      best = _mm512_max_ps(best, v);
      _mm512_storeu_ps(all_.z + i, v);
    }
    return bad ? NAN : max_lanes(best);
  }

  void weigh(float top) {
    const V8 shift = _mm512_set1_pd(top);
    for (int i = 0; i < all_.size; i += 8) {
      const V8 z = _mm512_cvtps_pd(_mm256_loadu_ps(all_.z + i));
      _mm512_storeu_pd(all_.weight + i, exp8(_mm512_sub_pd(z, shift)));
    }
  }

  // The least z whose weight is at least min_p of the greatest, which is 1.
  float least_of_weight(float min_p) const {
    const V8 bound = _mm512_set1_pd((double)min_p);
    __m256 least = _mm256_set1_ps(INFINITY);
    for (int i = 0; i < all_.size; i += 8) {
      const __mmask8 m =
          _mm512_cmp_pd_mask(_mm512_loadu_pd(all_.weight + i), bound, _CMP_GE_OQ);
      least = _mm256_mask_min_ps(least, m, least, _mm256_loadu_ps(all_.z + i));
    }
    return min_lanes8(least);
  }

  static float min_lanes8(__m256 v) {
    float lanes[8];
    _mm256_storeu_ps(lanes, v);
    return *std::min_element(lanes, lanes + 8);
  }

  // The greatest v among the tokens for which those with z >= v amount to `wanted`: their number,
  // or their weight. -inf if all together do not. Steps down from the top, then halves.
  float threshold(const Tokens& tokens, float top, double wanted, bool weighed) {
    float inside, outside = INFINITY;
    double above = 0;
    for (float step = 1;; step *= step < 64 ? 2.0f : 1e9f) {
      inside = top - step;
      const double amount = tokens.amount(inside, weighed);
      if (amount >= wanted) break;
      if (step > 1e36f) return -INFINITY;
      above = amount;
      outside = inside;
    }
    tokens.narrow(inside, outside, near_);
    float high = std::min(outside, std::nextafter(top, INFINITY));
    while (near_.size > 64) {
      const float middle = inside + (high - inside) / 2;
      if (!(middle > inside && middle < high)) break;
      const double amount = near_.amount(middle, weighed);
      if (above + amount >= wanted) {
        inside = middle;
        near_.narrow(middle, INFINITY, near_);
      } else {
        above += amount;
        high = middle;
        near_.narrow(-INFINITY, middle, near_);
      }
    }
    return threshold_of_few(wanted, weighed, above, inside);
  }

  float threshold_of_few(double wanted, bool weighed, double above, float least) {
    order_.clear();
    for (int i = 0; i < near_.size; ++i) {
      if (near_.z[i] > -INFINITY) order_.push_back({near_.z[i], weighed ? near_.weight[i] : 1.0});
    }
    std::sort(order_.begin(), order_.end(),
              [](const Entry& a, const Entry& b) { return a.z > b.z; });
    for (const Entry& entry : order_) {
      above += entry.amount;
      least = entry.z;
      if (above >= wanted) break;
    }
    return least;
  }

  // The first token at which the running sum of kept weights passes u of the whole.
  int draw(double u, float low, float top) {
    sums_.clear();
    double total = 0;
    for (int i = 0; i < all_.size; i += kBlock) {
      sums_.push_back(all_.mass(i, std::min(all_.size, i + kBlock), low));
      total += sums_.back();
    }
    const double target = u * total;
    double sum = 0;
    int last = first_equal(all_.z, all_.size, top);
    for (size_t b = 0; b < sums_.size(); ++b) {
      if (sum + sums_[b] <= target) {
        sum += sums_[b];
        continue;
      }
      const int end = std::min(all_.size, (int)(b + 1) * kBlock);
      for (int i = (int)b * kBlock; i < end; ++i) {
        if (!(all_.z[i] >= low) || all_.weight[i] == 0) continue;
        sum += all_.weight[i];
        last = i;
        if (sum > target) return i;
      }
      return last;  // the block's own sum was rounded otherwise
    }
    return last;
  }

  struct Entry {
    float z;
    double amount;
  };
  static constexpr int kBlock = 512;

  int vocabulary_;
  Tokens all_;   // of the row
  Tokens kept_;  // after min_p and top_k
  Tokens near_;  // around a threshold
  std::vector<Entry> order_;
  std::vector<double> sums_;
};

}  // namespace oct
