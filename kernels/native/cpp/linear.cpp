// y = x W^T + bias for few and for many rows, with the weight packed once.
//
// Packed form: panels of 32 output features; inside a panel the inner index runs first over k in steps, then over the
// 32 features, then over the k's of one step. A step is one k in float32 and a pair of k's in bfloat16, which is what
// one lane of a bf16 dot product takes. A tile of MR rows keeps its sums in registers over all of k. So
// each sum is one chain in the order of k, whatever the number of rows: a row's result never depends on its batch.
// Bytes: the weight once per block of rows whose inputs fit the cache, x and y once. Flops: 2 per weight and row.
#include <algorithm>

#include "calls.h"
#include "panels.h"

namespace mneme {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of inputs that stay in the second-level cache while all panels pass by
// Registers hold MR * kVectors sums: 24 of 32 with AVX-512, 12 of 16 with AVX2, else 8 of 16.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;
#else
constexpr int kMaxRows = 1;
#endif

struct Float32 {
  using Value = float;
  static constexpr int kStep = 1;
  using Input = float;
  static Input input(const float* x) { return *x; }
  static Vec multiply_add(Vec sum, Vec weight, Input x) { return sum + weight * x; }
};

struct BFloat16 {
  using Value = bf16;
  static constexpr int kStep = 2;
#if defined(__AVX512BF16__)
  using Input = __m512bh;
  static Input input(const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec multiply_add(Vec sum, Vec weight, Input x) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, x);
  }
#else
  struct Input {
    float first, second;
  };
  static Input input(const bf16* x) { return {to_float(x[0]), to_float(x[1])}; }
  static Vec multiply_add(Vec sum, Vec weight, Input x) {
    const BitVec bits = (BitVec)weight;
    sum += (Vec)(bits << 16) * x.first;
    return sum + (Vec)(bits & 0xffff0000u) * x.second;
  }
#endif
};

struct Problem {
  const void* x;       // [num_rows, x_stride]
  const void* packed;  // [num_panels, steps, kPanel, kStep]
  Output output;
  int64_t num_rows, x_stride, num_steps;
};

// What a tile asks memory for while it computes, in steps of `stride` bytes, `kVectors` to a step of k.
struct Ahead {
  const char* at;
  int64_t stride;
};

// The only tile of a panel runs a little ahead of itself; several share the next panel among them, so that memory works
// while the later ones compute from the caches.
inline Ahead ahead_of(const Problem& problem, int64_t panel, int64_t tile, int64_t num_tiles) {
  const int64_t panel_bytes = problem.num_steps * kPanel * 4;
  const char* weight = static_cast<const char*>(problem.packed) + panel * panel_bytes;
  if (num_tiles == 1) return {weight + kAheadBytes, 64};
  return {weight + panel_bytes + panel_bytes * tile / num_tiles, 64 / num_tiles};
}

// MR rows from `row` times one panel.
template <class Type, int MR>
__attribute__((noinline)) void tile(const Problem& problem, int64_t row, int64_t panel, Ahead ahead) {
  // A step of either type has 4 bytes a feature.
  const float* weight = static_cast<const float*>(problem.packed) + panel * problem.num_steps * kPanel;
  const typename Type::Value* x = static_cast<const typename Type::Value*>(problem.x) + row * problem.x_stride;
  Vec sums[MR][kVectors] = {};
  for (int64_t step = 0; step < problem.num_steps; ++step) {
    Vec weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(ahead.at + v * ahead.stride);
      weights[v] = load(weight + v * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const typename Type::Input input = Type::input(x + r * problem.x_stride);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Type::multiply_add(sums[r][v], weights[v], input);
    }
    weight += kPanel;
    x += Type::kStep;
    ahead.at += kVectors * ahead.stride;
  }
  alignas(64) float values[MR * kPanel];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(values + r * kPanel + v * kLanes, sums[r][v]);
  finish(problem.output, row, MR, panel, values);
}

// One panel for rows [row, row + num_rows), num_rows <= MR: finds the tile of that many rows.
template <class Type, int MR>
void tile_of(const Problem& problem, int64_t row, int64_t num_rows, int64_t panel, Ahead ahead) {
  if constexpr (MR > 1) {
    if (num_rows < MR) return tile_of<Type, MR - 1>(problem, row, num_rows, panel, ahead);
  }
  tile<Type, MR>(problem, row, panel, ahead);
}

// Rows [first, last) of one panel, in tiles of equal height, to one row.
template <class Type>
void block_of(const Problem& problem, int64_t first, int64_t last, int64_t panel) {
  const int64_t num_rows = last - first, num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t begin = num_rows * t / num_tiles, end = num_rows * (t + 1) / num_tiles;
    tile_of<Type, kMaxRows>(problem, first + begin, end - begin, panel, ahead_of(problem, panel, t, num_tiles));
  }
}

template <class Type>
void linear(const Problem& problem, int num_threads) {
  const int64_t num_panels = (problem.output.num_features + kPanel - 1) / kPanel;
  const int64_t row_bytes = problem.num_steps * Type::kStep * sizeof(typename Type::Value);
  const int64_t block_rows = std::max<int64_t>(kMaxRows, kBlockBytes / std::max<int64_t>(1, row_bytes));
  const int64_t num_blocks = (problem.num_rows + block_rows - 1) / block_rows;
  // A few shares for each thread, so that one whose core is taken from it does not hold up all others.
  const int64_t share = std::max<int64_t>(1, num_panels / (4 * num_threads));
#pragma omp parallel for schedule(dynamic, share) num_threads(num_threads) if (num_threads > 1)
  for (int64_t index = 0; index < num_blocks * num_panels; ++index) {
    const int64_t block = index / num_panels;
    block_of<Type>(problem, problem.num_rows * block / num_blocks, problem.num_rows * (block + 1) / num_blocks,
                   index % num_panels);
  }
}

constexpr int64_t kUnpackSteps = 16;  // whose 2 KB are read at once: each feature gets a cache line of them

// Features of one panel back into rows, [features, num_steps] of 4 bytes.
void unpack_panel(const uint32_t* __restrict packed, int64_t num_steps, int count, uint32_t* __restrict weight) {
  int64_t step = 0;
  for (; step + kUnpackSteps <= num_steps; step += kUnpackSteps) {
    const uint32_t* from = packed + step * kPanel;
    for (int feature = 0; feature < count; ++feature)
      for (int64_t i = 0; i < kUnpackSteps; ++i) weight[feature * num_steps + step + i] = from[i * kPanel + feature];
  }
  for (; step < num_steps; ++step)
    for (int feature = 0; feature < count; ++feature)
      weight[feature * num_steps + step] = packed[step * kPanel + feature];
}

}  // namespace
}  // namespace mneme

extern "C" void mneme_linear(const MnemeLinear* weight, const void* x, int64_t num_rows, int64_t x_stride, void* y,
                             int32_t float_out, int32_t num_threads) {
  using namespace mneme;
  if (weight->bits) return mneme_linear_quantized(weight, x, num_rows, x_stride, y, float_out, num_threads);
  const bool is_float = weight->dtype == kFloat32;
  const Output output{weight->bias, y, weight->num_features, is_float || float_out};
  const Problem problem{x, weight->packed, output, num_rows, x_stride, weight->num_steps};
  if (is_float)
    linear<Float32>(problem, num_threads);
  else
    linear<BFloat16>(problem, num_threads);
}

// `out` [num_features, num_steps] of 4 bytes: the weight as it was before it was packed, with zeros behind an odd row.
extern "C" void mneme_unpack(const MnemeLinear* weight, void* out, int32_t num_threads) {
  using namespace mneme;
  const int64_t num_steps = weight->num_steps, num_panels = (weight->num_features + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    const int64_t first = panel * kPanel, at = first * num_steps;
    const int count = static_cast<int>(std::min<int64_t>(kPanel, weight->num_features - first));
    unpack_panel(static_cast<const uint32_t*>(weight->packed) + at, num_steps, count, static_cast<uint32_t*>(out) + at);
  }
}
