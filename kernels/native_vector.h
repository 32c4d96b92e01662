// Sixteen float32 at a time: loads and stores of either type, and the exponential.
#pragma once

#include "native_common.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed between functions: all of them are inlined

namespace mneme {

constexpr int kLanes = 16;

typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));

inline f32x16 splat(float x) { return x - f32x16{}; }

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16*>(p); }
inline f32x16 load(const bf16* p) {
  return (f32x16)(__builtin_convertvector(*reinterpret_cast<const u16x16*>(p), u32x16) << 16);
}

inline void store(float* p, f32x16 x) { *reinterpret_cast<f32x16*>(p) = x; }
// Round to nearest even; a NaN stays one.
inline void store(bf16* p, f32x16 x) {
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const u32x16 chosen = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
  *reinterpret_cast<u16x16*>(p) = __builtin_convertvector(chosen >> 16, u16x16);
}

// The first `count` lanes; the others are 0.
template <class T>
inline f32x16 load(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  T padded[kLanes] = {};
  std::memcpy(padded, p, sizeof(T) * count);
  return load(padded);
}
template <class T>
inline void store(T* p, f32x16 x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, sizeof(T) * count);
}

inline float sum(f32x16 x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// e^x within 2 units in the last place; x is cut to [-87, 88], so that no result is denormal or infinite. NaN stays.
inline f32x16 exponential(f32x16 x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const f32x16 shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number of ln 2
  const f32x16 whole = shifted - 12582912.0f;
  f32x16 rest = x - whole * 0.693145751953125f;  // ln 2 in two parts: the product with the first is exact
  rest = rest - whole * 1.42860682030941723e-6f;
  f32x16 series = splat(1.0f / 5040);  // Taylor: |rest| <= ln 2 / 2, so the next term is below 2^-27
  series = series * rest + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const i32x16 exponent = ((i32x16)shifted - 0x4b400000 + 127) << 23;
  return series * (f32x16)exponent;
}

}  // namespace mneme
