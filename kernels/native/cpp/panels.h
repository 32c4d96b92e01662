// What kernels of both kinds of packed weights share: how many output features lie side by side, and how a tile ends.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace mneme {

constexpr int kPanel = 32;  // output features of a panel
constexpr int kVectors = kPanel / kLanes;
// With 4 KB memory idles (a fifth slower at 8 rows); far more does not fit the first-level cache.
constexpr int kAheadBytes = 16384;

// Where the results of a product go.
struct Output {
  const float* bias;  // [num_features] or null
  void* y;            // [num_rows, num_features]
  int64_t num_features;
  bool is_float;  // y holds float32 whatever x is
};

// Adds the bias, rounds and writes the sums of `num_rows` rows from `row`, one panel.
inline __attribute__((noinline)) void finish(const Output& output, int64_t row, int num_rows, int64_t panel,
                                             float* sums) {
  const int64_t feature = panel * kPanel;
  const int count = static_cast<int>(std::min<int64_t>(kPanel, output.num_features - feature));
  for (int r = 0; r < num_rows; ++r) {
    float* values = sums + r * kPanel;
    if (output.bias)
      for (int i = 0; i < count; ++i) values[i] += output.bias[feature + i];
    const int64_t at = (row + r) * output.num_features + feature;
    if (output.is_float) {
      std::copy(values, values + count, static_cast<float*>(output.y) + at);
      continue;
    }
    bf16* y = static_cast<bf16*>(output.y) + at;
    for (int i = 0; i < count; i += kLanes) store(y + i, load(values + i), count - i);
  }
}

}  // namespace mneme
