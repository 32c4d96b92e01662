// The decoder's row-wise operations: RMS norm, with or without the residual's addition, the gate of the MLP, the mask of
// a grammar, and the draw of a token.
// Each row is computed alone and in one order, so it does not depend on the rows beside it.
// Bytes: inputs and results once each (a draw reads its logits twice, unless it is greedy). Flops per element: norms 4,
// with the addition 5, gates about 20, the best token 3, other draws about 20.
#include "calls.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mneme {
namespace {

constexpr int64_t kParallelElements = 1 << 15;  // fewer are done before a team of threads has begun

template <class T>
float sum_of_squares(const T* x, int64_t count) {
  Vec even = {}, odd = {};
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const Vec first = load_float(x + i, count - i);
    even += first * first;
    if (count - i <= kLanes) break;
    const Vec second = load_float(x + i + kLanes, count - i - kLanes);
    odd += second * second;
  }
  return horizontal_sum(even + odd);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t count, float eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  for (int64_t i = 0; i < count; i += kLanes)
    store(out + i, load_float(x + i, count - i) * scale * load_float(weight + i, count - i), count - i);
}

template <class T>
void add_row(T* hidden, const T* delta, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    store(hidden + i, load_float(hidden + i, count - i) + load_float(delta + i, count - i), count - i);
}

// e^x within 2 units in the last place; x is cut to [-87, 88], so that no result is denormal or infinite. NaN stays.
inline Vec exponential(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number of ln 2
  const Vec whole = shifted - 12582912.0f;
  Vec rest = x - whole * 0.693145751953125f;  // ln 2 in two parts: the product with the first is exact
  rest = rest - whole * 1.42860682030941723e-6f;
  Vec series = splat(1.0f / 5040);  // Taylor: |rest| <= ln 2 / 2, so the next term is below 2^-27
  series = series * rest + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const IntVec exponent = ((IntVec)shifted - 0x4b400000 + 127) << 23;
  return series * (Vec)exponent;
}

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// x times the normal distribution function; erfc by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
inline Vec gelu(Vec x) {
  const Vec z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
  const Vec t = 1.0f / (1.0f + 0.3275911f * z);
  Vec series = t * 1.061405429f - 1.453152027f;
  series = series * t + 1.421413741f;
  series = series * t - 0.284496736f;
  series = series * t + 0.254829592f;
  const Vec below = 0.5f * series * t * exponential(-z * z);
  return x * (x < 0.0f ? below : 1.0f - below);
}

template <int kActivation>
Vec activated(Vec x) {
  if (kActivation == kGelu) return gelu(x);
  // tanh(u) = 2 / (1 + e^-2u) - 1, so both others are x / (1 + e^-s) for some s.
  const Vec s = kActivation == kSilu ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-s));
}

template <class T, int kActivation>
void gate_rows(const T* gate_up, T* out, int64_t num_rows, int64_t count, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* gate = gate_up + row * 2 * count;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec up = load_float(gate + count + i, count - i);
      store(out + row * count + i, activated<kActivation>(load_float(gate + i, count - i)) * up, count - i);
    }
  }
}

template <class T>
void gate(const T* gate_up, T* out, int64_t num_rows, int64_t count, int32_t activation, int num_threads) {
  if (activation == kSilu)
    gate_rows<T, kSilu>(gate_up, out, num_rows, count, num_threads);
  else if (activation == kGelu)
    gate_rows<T, kGelu>(gate_up, out, num_rows, count, num_threads);
  else
    gate_rows<T, kGeluTanh>(gate_up, out, num_rows, count, num_threads);
}

// A row of x is [num_inner, count] with strides: the heads of a token inside a wider projection, or one row.
template <class T>
void norm(const T* x, const T* weight, T* out, int64_t num_outer, int64_t outer_stride, int64_t num_inner,
          int64_t inner_stride, int64_t count, float eps, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t outer = 0; outer < num_outer; ++outer)
    for (int64_t inner = 0; inner < num_inner; ++inner)
      norm_row(x + outer * outer_stride + inner * inner_stride, weight, out + (outer * num_inner + inner) * count,
               count, eps);
}

template <class T>
void add_norm(T* hidden, const T* delta, const T* weight, T* out, int64_t num_rows, int64_t count, float eps,
              int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    add_row(hidden + row * count, delta + row * count, count);
    norm_row(hidden + row * count, weight, out + row * count, count, eps);
  }
}

// The largest of `count` numbers and the first place where it stands; NaN if there is one.
struct Best {
  int64_t index;
  float value;
};
Best best_of(const float* x, int64_t count) {
  Vec largest = splat(-INFINITY);
  IntVec is_nan = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec next = load_float(x + i);
    is_nan |= next != next;
    largest = next > largest ? next : largest;
  }
  float value = -INFINITY;
  bool any_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    value = std::max(value, largest[lane]);
    any_nan |= is_nan[lane] != 0;
  }
  for (; i < count; ++i) {
    value = std::max(value, x[i]);
    any_nan |= x[i] != x[i];
  }
  return any_nan ? Best{0, NAN} : Best{std::find(x, x + count, value) - x, value};
}

// Sets the logits of tokens whose bit is 0 to -inf. Words are mostly all ones, where any text may follow, or all zeros.
void mask_row(float* x, const uint32_t* bits, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) {
    const uint32_t word = bits[i / 32];
    if (word == ~0u) continue;
    const int size = static_cast<int>(std::min<int64_t>(32, count - i));
    if (word == 0)
      std::fill_n(x + i, size, -INFINITY);
    else
      for (int bit = 0; bit < size; ++bit) x[i + bit] = word >> bit & 1 ? x[i + bit] : -INFINITY;
  }
}

// e^((x - best) * scale) of one vector of logits; 0 where that is below what exponential() reaches.
inline Vec weights_of(Vec x, float best, float scale) {
  const Vec power = (x - best) * scale;
  return power < -87.0f ? Vec{} : exponential(power);
}

constexpr int64_t kBlock = 256;  // weights whose sum is kept

// `count` weights from x, the first of which is lane 0: their sum, and their values where `values` is given.
double sum_weights(const float* x, int64_t count, float best, float scale, float* values) {
  Vec total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec weight = weights_of(load_float(x + i, count - i), best, scale);
    for (int64_t lane = count - i; lane < kLanes; ++lane) weight[lane] = 0;
    if (values) store(values + i, weight);
    total += weight;
  }
  return horizontal_sum(total);
}

// The first of `count` places at which the cumulative weight is above `target`; else the last that has any weight.
template <class T>
int64_t first_beyond(const T* weight, int64_t count, double target, double* before) {
  int64_t last = 0;
  double total = 0, before_last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weight[i] > 0) last = i, before_last = total;
    total += weight[i];
    if (total > target) break;
  }
  *before = before_last;
  return last;
}

// The best token where the temperature is 0; -1 where the best logit is not finite.
int64_t draw(const float* logits, int64_t count, double temperature, double number, std::vector<double>& sums) {
  const auto [index, best] = best_of(logits, count);
  if (!std::isfinite(best)) return -1;
  if (temperature == 0) return index;
  const float scale = static_cast<float>(1.0 / temperature);
  const int64_t num_blocks = (count + kBlock - 1) / kBlock;
  sums.resize(num_blocks);
  double total = 0, before;
  for (int64_t b = 0; b < num_blocks; ++b)
    total += sums[b] = sum_weights(logits + b * kBlock, std::min(kBlock, count - b * kBlock), best, scale, nullptr);
  const int64_t block = first_beyond(sums.data(), num_blocks, number * total, &before);
  float values[kBlock];
  const int64_t size = std::min(kBlock, count - block * kBlock);
  sum_weights(logits + block * kBlock, size, best, scale, values);
  return block * kBlock + first_beyond(values, size, std::max(number * total - before, 0.0), &before);
}

int team(int64_t num_elements, int num_threads) { return num_elements < kParallelElements ? 1 : num_threads; }

}  // namespace
}  // namespace mneme

using mneme::bf16;

// x [num_outer, num_inner, count] by strides, in elements; weight [count]; out like x, contiguous.
extern "C" void mneme_rms_norm(const void* x, const void* weight, void* out, int64_t num_outer, int64_t outer_stride,
                               int64_t num_inner, int64_t inner_stride, int64_t count, float eps, int32_t dtype,
                               int32_t num_threads) {
  const int threads = mneme::team(num_outer * num_inner * count, num_threads);
  if (dtype == mneme::kFloat32)
    mneme::norm(static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<float*>(out), num_outer,
                outer_stride, num_inner, inner_stride, count, eps, threads);
  else
    mneme::norm(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<bf16*>(out), num_outer,
                outer_stride, num_inner, inner_stride, count, eps, threads);
}

// hidden += delta, rounded; out = norm of that. All [num_rows, count], contiguous.
extern "C" void mneme_add_rms_norm(void* hidden, const void* delta, const void* weight, void* out, int64_t num_rows,
                                   int64_t count, float eps, int32_t dtype, int32_t num_threads) {
  const int threads = mneme::team(num_rows * count, num_threads);
  if (dtype == mneme::kFloat32)
    mneme::add_norm(static_cast<float*>(hidden), static_cast<const float*>(delta), static_cast<const float*>(weight),
                    static_cast<float*>(out), num_rows, count, eps, threads);
  else
    mneme::add_norm(static_cast<bf16*>(hidden), static_cast<const bf16*>(delta), static_cast<const bf16*>(weight),
                    static_cast<bf16*>(out), num_rows, count, eps, threads);
}

// gate_up [num_rows, 2 count], out [num_rows, count], contiguous. activation: 0 silu, 1 gelu, 2 its tanh form.
extern "C" void mneme_gated(const void* gate_up, void* out, int64_t num_rows, int64_t count, int32_t activation,
                            int32_t dtype, int32_t num_threads) {
  const int threads = mneme::team(num_rows * count, num_threads);
  if (dtype == mneme::kFloat32)
    mneme::gate(static_cast<const float*>(gate_up), static_cast<float*>(out), num_rows, count, activation, threads);
  else
    mneme::gate(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), num_rows, count, activation, threads);
}

// logits [num_rows, count], bits [num_rows, num_words], contiguous.
extern "C" void mneme_mask_logits(float* logits, const uint32_t* bits, int64_t num_rows, int64_t count,
                                  int64_t num_words, int32_t num_threads) {
  const int threads = mneme::team(num_rows * count, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; ++row)
    mneme::mask_row(logits + row * count, bits + row * num_words, count);
}

// logits [num_rows, count], contiguous; options: num_rows temperatures, then as many numbers; index [num_rows].
extern "C" void mneme_draw_whole(const float* logits, const double* options, int64_t* index, int64_t num_rows,
                                 int64_t count, int32_t num_threads) {
  const int threads = mneme::team(num_rows * count, num_threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<double> sums;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row)
      index[row] = mneme::draw(logits + row * count, count, options[row], options[num_rows + row], sums);
  }
}
