// y = x W^T + bias with a weight of 8 or 4 bits a number, in groups of 32 inputs that have a scale each.
//
// A weight is scale * code + minimum, its code unsigned. Inputs are rounded to 8 bits, each group of a row with a scale
// of its own, so a product is a sum of whole numbers for each group, exact, and two roundings to float32 after it.
// Packed form: panels of 32 output features; in a panel one group of inputs after the other, and in a group steps of
// 4 inputs that lie side by side for each feature (what one lane of a byte dot product takes). In 4 bits a byte has the
// codes of one step in its lower half and those of the next in its upper. Behind a group's codes lie its scales and, in
// 4 bits, its minima, float16; with 8 bits the minimum is -128 * scale. So all is read as one stream.
// Groups are added in their order whatever the number of rows: a row's result never depends on its batch.
// Bytes: the weight once per block of rows whose inputs fit the cache: 1.06 a weight in 8 bits, 0.62 in 4; x, y once.
// Flops: 2 per weight and row, in whole numbers.
#include <algorithm>
#include <cmath>
#include <vector>

#include "calls.h"
#include "panels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mneme {
namespace {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kStep = 4;
constexpr int kSteps = kGroup / kStep;
constexpr int64_t kBlockBytes = 512 << 10;  // of rounded inputs that stay in the second-level cache
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;  // sums of whole numbers and of floats: 24 of 32 registers
#else
constexpr int kMaxRows = 1;
#endif

// Four inputs of 8 bits in the form that a product takes them in.
struct Four {
#if defined(__AVX512VNNI__)
  IntVec all;
#else
  IntVec even, odd;  // the first and third, and the second and fourth, as pairs of 16 bits
#endif
};

inline Four four(const int8_t* x) {
#if defined(__AVX512VNNI__)
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return {splat(bits)};
#else
  const auto pair = [](int low, int high) { return splat(static_cast<int32_t>((low & 0xffff) | high * 0x10000)); };
  return {pair(x[0], x[2]), pair(x[1], x[3])};
#endif
}

// Adds products of pairs of 16 bits.
inline IntVec add_pairs(IntVec sum, IntVec a, IntVec b) {
#if defined(__AVX512BW__)
  return sum + (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX512F__)
  return sum + (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sum + (a & 0xffff) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);  // codes of weights, `a`, are not negative
#endif
}

// Adds, in each lane, four codes times four inputs.
inline IntVec add_products(IntVec sum, IntVec codes, const Four& x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x.all);
#else
  const IntVec low = splat(0x00ff00ff);
  sum = add_pairs(sum, codes & low, x.even);
  return add_pairs(sum, (codes >> 8) & low, x.odd);
#endif
}

inline Vec load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec values;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = p[i], exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                                              static_cast<int>(exponent ? exponent : 1) - 25);
    values[i] = bits >> 15 ? -value : value;
  }
  return values;
#endif
}

template <int Bits>
constexpr int kGroupBytes = kPanel * (kGroup * Bits / 8 + (Bits == 8 ? 2 : 4));

struct Problem {
  const uint8_t* packed;  // [num_panels, num_groups]: codes [kSteps, kPanel, kStep], scales [kPanel], minima [kPanel]
  Output output;
  const int8_t* x;        // [num_rows, num_groups, kGroup]
  const float* x_scales;  // [num_rows, num_groups]
  const int32_t* x_sums;  // [num_rows, num_groups]
  int64_t num_rows, num_groups;
};

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

// Rounds a group of inputs to 8 bits. Its scale is NaN where an input is none or infinite.
void round_group(const float* x, int8_t* rounded, float* scale, int32_t* sum) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to whole numbers
  Vec largest = {}, none = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    const Vec value = load(x + i);
    largest = larger(largest, reinterpret_cast<Vec>(reinterpret_cast<BitVec>(value) & 0x7fffffffu));
    none += value * 0.0f;
  }
  const float most = horizontal_max(largest);
  *scale = most / 127 + horizontal_sum(none);
  const Vec to_units = splat(most > 0 && *scale == *scale ? 127 / most : 0.0f);
  IntVec total = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    const IntVec whole = reinterpret_cast<IntVec>(load(x + i) * to_units + magic) - reinterpret_cast<IntVec>(magic);
    total += whole;
    const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
    std::memcpy(rounded + i, &bytes, kLanes);
  }
  *sum = 0;
  for (int i = 0; i < kLanes; ++i) *sum += total[i];
}

template <class T>
void round_row(const T* x, const int32_t* order, int64_t num_inputs, int8_t* rounded, float* scales, int32_t* sums) {
  for (int64_t first = 0; first < num_inputs; first += kGroup) {
    alignas(64) float values[kGroup] = {};
    if (order)
      for (int64_t i = first; i < std::min(first + kGroup, num_inputs); ++i)
        values[i - first] = to_float(x[order[i]]);
    for (int i = 0; i < kGroup && !order; i += kLanes)
      store(values + i, load_float(x + first + i, std::max<int64_t>(0, num_inputs - first - i)));
    round_group(values, rounded + first, scales++, sums++);
  }
}

// MR rows from `row` times one panel.
template <int Bits, int MR>
__attribute__((noinline)) void tile(const Problem& problem, int64_t row, int64_t panel, const char* ahead,
                                    int64_t ahead_stride) {
  const uint8_t* packed = problem.packed + panel * problem.num_groups * kGroupBytes<Bits>;
  const int8_t* x = problem.x + row * problem.num_groups * kGroup;
  Vec sums[MR][kVectors] = {};
  for (int64_t group = 0; group < problem.num_groups; ++group) {
    IntVec products[MR][kVectors];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const IntVec start = splat(Bits == 8 ? -128 * problem.x_sums[(row + r) * problem.num_groups + group] : 0);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) products[r][v] = start;
    }
    for (int step = 0; step < kSteps; step += 8 / Bits) {
      IntVec found[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(ahead + v * ahead_stride);
        found[v] = load(reinterpret_cast<const int32_t*>(packed) + v * kLanes);
      }
      packed += kPanel * kStep;
      ahead += kVectors * ahead_stride;
#pragma GCC unroll 2
      for (int half = 0; half < 8 / Bits; ++half) {
        IntVec part[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) part[v] = Bits == 8 ? found[v] : (found[v] >> (4 * half)) & 0x0f0f0f0f;
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) {
          const Four input = four(x + (r * problem.num_groups + group) * kGroup + (step + half) * kStep);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) products[r][v] = add_products(products[r][v], part[v], input);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(ahead + 2 * v * kLanes);
      const Vec scale = load_half(reinterpret_cast<const uint16_t*>(packed) + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r)
        sums[r][v] += __builtin_convertvector(products[r][v], Vec) *
                      (scale * problem.x_scales[(row + r) * problem.num_groups + group]);
      if (Bits == 8) continue;
      const Vec minimum = load_half(reinterpret_cast<const uint16_t*>(packed) + kPanel + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        const int64_t of_row = (row + r) * problem.num_groups + group;
        sums[r][v] += minimum * (problem.x_scales[of_row] * static_cast<float>(problem.x_sums[of_row]));
      }
    }
    packed += kGroupBytes<Bits> - kPanel * kGroup * Bits / 8;
    ahead += (kGroupBytes<Bits> - kPanel * kGroup * Bits / 8) / 64 * ahead_stride;
  }
  alignas(64) float values[MR * kPanel];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(values + r * kPanel + v * kLanes, sums[r][v]);
  finish(problem.output, row, MR, panel, values);
}

template <int Bits, int MR>
void tile_of(const Problem& problem, int64_t row, int64_t num_rows, int64_t panel, const char* ahead, int64_t stride) {
  if constexpr (MR > 1) {
    if (num_rows < MR) return tile_of<Bits, MR - 1>(problem, row, num_rows, panel, ahead, stride);
  }
  tile<Bits, MR>(problem, row, panel, ahead, stride);
}

template <int Bits>
void linear(const Problem& problem, int num_threads) {
  const int64_t num_panels = (problem.output.num_features + kPanel - 1) / kPanel;
  const int64_t panel_bytes = problem.num_groups * kGroupBytes<Bits>;
  const int64_t block_rows = std::max<int64_t>(kMaxRows, kBlockBytes / std::max<int64_t>(1, problem.num_groups * kGroup));
  const int64_t num_blocks = (problem.num_rows + block_rows - 1) / block_rows;
  const int64_t share = std::max<int64_t>(1, num_panels / (4 * num_threads));
#pragma omp parallel for schedule(dynamic, share) num_threads(num_threads) if (num_threads > 1)
  for (int64_t index = 0; index < num_blocks * num_panels; ++index) {
    const int64_t block = index / num_panels, panel = index % num_panels;
    const int64_t first = problem.num_rows * block / num_blocks;
    const int64_t num_rows = problem.num_rows * (block + 1) / num_blocks - first;
    const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
    const char* weight = reinterpret_cast<const char*>(problem.packed) + panel * panel_bytes;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t begin = num_rows * t / num_tiles, end = num_rows * (t + 1) / num_tiles;
      // As in linear.cpp: a tile alone runs ahead of itself, several share the next panel among them.
      const char* ahead = num_tiles == 1 ? weight + kAheadBytes : weight + panel_bytes + panel_bytes * t / num_tiles;
      tile_of<Bits, kMaxRows>(problem, first + begin, end - begin, panel, ahead,
                              num_tiles == 1 ? 4 * kLanes : 4 * kLanes / num_tiles);
    }
  }
}

}  // namespace
}  // namespace mneme

// `mneme_linear` of a weight that has `bits`.
extern "C" void mneme_linear_quantized(const MnemeLinear* weight, const void* x, int64_t num_rows, int64_t x_stride,
                                       void* y, int32_t float_out, int32_t num_threads) {
  using namespace mneme;
  const int64_t num_groups = (weight->num_steps + kGroup - 1) / kGroup;
  thread_local std::vector<int8_t> kept_rounded;
  thread_local std::vector<float> kept_scales;
  thread_local std::vector<int32_t> kept_sums;
  kept_rounded.resize(num_rows * num_groups * kGroup);
  kept_scales.resize(num_rows * num_groups);
  kept_sums.resize(num_rows * num_groups);
  int8_t* const rounded = kept_rounded.data();  // what other threads write to, too
  float* const scales = kept_scales.data();
  int32_t* const sums = kept_sums.data();
  const bool is_float = weight->dtype == kFloat32;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 8)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t at = row * num_groups;
    if (is_float)
      round_row(static_cast<const float*>(x) + row * x_stride, weight->order, weight->num_steps, rounded + at * kGroup,
                scales + at, sums + at);
    else
      round_row(static_cast<const bf16*>(x) + row * x_stride, weight->order, weight->num_steps, rounded + at * kGroup,
                scales + at, sums + at);
  }
  const Output output{weight->bias, y, weight->num_features, is_float || float_out};
  const Problem problem{static_cast<const uint8_t*>(weight->packed), output, rounded, scales, sums, num_rows, num_groups};
  if (weight->bits == 4)
    linear<4>(problem, num_threads);
  else
    linear<8>(problem, num_threads);
}
