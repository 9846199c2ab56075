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

typedef __m512d V8;

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

// One row's work; buffers are reused from row to row. Rows are padded with -inf to 16.
class Sampler {
 public:
  static size_t bytes(int vocabulary) { return (size_t)(vocabulary + 16) * 12 + 2 * kLine; }

  Sampler(char* memory, int vocabulary)
      : size_((vocabulary + 15) / 16 * 16), vocabulary_(vocabulary) {
    z_ = (float*)memory;
    weight_ = (double*)(memory + ((size_t)size_ * 4 + kLine - 1) / kLine * kLine);
  }

  int choose(const float* logits, const SampleSettings& s) {
    const float top = scale(logits, s.temperature);
    if (!(top > -INFINITY && top < INFINITY)) return 0;
    if (s.temperature == 0) return first_equal(z_, size_, top);
    weigh(top);
    low_ = -INFINITY;
    if (s.min_p > 0) keep_min_p(s.min_p);
    if (s.top_k > 0 && s.top_k < vocabulary_) keep_top_k(s.top_k, top);
    if (s.top_p < 1) keep_top_p(s.top_p, top);
    return draw(uniform(s.seed, s.position), top);
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
    const V16 divisor = _mm512_set1_ps(temperature == 0 ? 1.0f : temperature);
    const V16 minus = _mm512_set1_ps(-INFINITY);
    V16 best = minus;
    __mmask16 bad = 0;
    for (int i = 0; i < size_; i += 16) {
      const __mmask16 m = tail_mask(vocabulary_ - i);
      const V16 v = _mm512_mask_div_ps(minus, m, _mm512_maskz_loadu_ps(m, logits + i), divisor);
      bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      best = _mm512_max_ps(best, v);
      _mm512_storeu_ps(z_ + i, v);
    }
    return bad ? NAN : max_lanes(best);
  }

  void weigh(float top) {
    const V8 shift = _mm512_set1_pd(top);
    for (int i = 0; i < size_; i += 8) {
      const V8 z = _mm512_cvtps_pd(_mm256_loadu_ps(z_ + i));
      _mm512_storeu_pd(weight_ + i, exp8(_mm512_sub_pd(z, shift)));
    }
  }

  // Weight and number of those with low <= z; blocks of 512 are summed by themselves.
  double mass(float low) const {
    double total = 0;
    for (int i = 0; i < size_; i += 512) total += block_mass(i, std::min(size_, i + 512), low);
    return total;
  }
  double block_mass(int first, int last, float low) const {
    const __m256 bound = _mm256_set1_ps(low);
    V8 sum = _mm512_setzero_pd();
    for (int i = first; i < last; i += 8) {
      const __mmask8 m = _mm256_cmp_ps_mask(_mm256_loadu_ps(z_ + i), bound, _CMP_GE_OQ);
      sum = _mm512_mask_add_pd(sum, m, sum, _mm512_loadu_pd(weight_ + i));
    }
    return _mm512_reduce_add_pd(sum);
  }
  long count(float low) const {
    const V16 bound = _mm512_set1_ps(low);
    long n = 0;
    for (int i = 0; i < size_; i += 16) {
      n += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_loadu_ps(z_ + i), bound, _CMP_GE_OQ));
    }
    return n;
  }
  // Indices of those with low <= z < high.
  void between(float low, float high) {
    found_.clear();
    const V16 a = _mm512_set1_ps(low), b = _mm512_set1_ps(high);
    for (int i = 0; i < size_; i += 16) {
      const V16 v = _mm512_loadu_ps(z_ + i);
      unsigned m = _mm512_cmp_ps_mask(v, a, _CMP_GE_OQ) & _mm512_cmp_ps_mask(v, b, _CMP_LT_OQ);
      for (; m; m &= m - 1) found_.push_back(i + __builtin_ctz(m));
    }
  }

  // The least z whose weight is at least min_p of the greatest (which is 1).
  void keep_min_p(float min_p) {
    float least = INFINITY;
    for (int i = 0; i < vocabulary_; ++i) {
      if (weight_[i] >= (double)min_p && z_[i] < least) least = z_[i];
    }
    low_ = std::max(low_, least);
  }

  // A bound below which the answer lies not, and one above: z >= inside is enough, z >= outside
  // is not. Widens steps from the top, then halves, until few lie between.
  template <class Enough>
  bool bracket(float top, Enough enough, float& inside, float& outside) {
    outside = INFINITY;
    for (float step = 1;; step *= 2) {
      inside = std::max(top - step, low_);
      if (enough(inside)) break;
      if (inside <= low_ || step > 1e30f) return false;
      outside = inside;
    }
    for (int tries = 0; tries < 64; ++tries) {
      const float high = std::min(outside, std::nextafter(top, INFINITY));
      const float middle = inside + (high - inside) / 2;
      if (!(middle > inside && middle < high)) break;
      if (tries >= 2) {
        between(inside, outside);
        if (found_.size() <= 1024) return true;
      }
      (enough(middle) ? inside : outside) = middle;
    }
    between(inside, outside);
    return true;
  }

  // Keeps the k greatest, and what equals the least of them.
  void keep_top_k(int k, float top) {
    float inside, outside;
    if (!bracket(top, [&](float low) { return count(low) >= k; }, inside, outside)) return;
    const long above = outside < INFINITY ? count(outside) : 0;
    std::vector<float>& values = values_;
    values.clear();
    for (int i : found_) values.push_back(z_[i]);
    const long nth = k - above - 1;
    std::nth_element(values.begin(), values.begin() + nth, values.end(), std::greater<float>());
    low_ = std::max(low_, values[nth]);
  }

  // Keeps each token unless those strictly above it weigh p of all or more.
  void keep_top_p(float p, float top) {
    const double wanted = (double)p * mass(low_);
    float inside, outside;
    // Not enough even with all kept: rounding of the sums, or p = 1.
    if (!bracket(top, [&](float low) { return mass(low) >= wanted; }, inside, outside)) return;
    double sum = outside < INFINITY ? mass(outside) : 0;
    std::sort(found_.begin(), found_.end(), [&](int a, int b) { return z_[a] > z_[b]; });
    float least = found_.empty() ? inside : z_[found_[0]];
    for (size_t i = 0; i < found_.size();) {
      if (i && sum >= wanted) break;
      least = z_[found_[i]];
      for (; i < found_.size() && z_[found_[i]] == least; ++i) sum += weight_[found_[i]];
    }
    low_ = std::max(low_, least);
  }

  // The first token at which the running sum of kept weights passes u of the whole.
  int draw(double u, float top) {
    sums_.clear();
    double total = 0;
    for (int i = 0; i < size_; i += 512) {
      sums_.push_back(block_mass(i, std::min(size_, i + 512), low_));
      total += sums_.back();
    }
    const double target = u * total;
    double sum = 0;
    int last = first_equal(z_, size_, top);
    for (size_t b = 0; b < sums_.size(); ++b) {
      if (sum + sums_[b] <= target) {
        sum += sums_[b];
        continue;
      }
      const int end = std::min(size_, (int)(b + 1) * 512);
      for (int i = (int)b * 512; i < end; ++i) {
        if (!(z_[i] >= low_) || weight_[i] == 0) continue;
        sum += weight_[i];
        last = i;
        if (sum > target) return i;
      }
      return last;  // the block's own sum rounded otherwise
    }
    return last;
  }

  int size_;
  int vocabulary_;
  float* z_;
  double* weight_;
  float low_ = 0;
  std::vector<int> found_;
  std::vector<float> values_;
  std::vector<double> sums_;
};

}  // namespace oct
