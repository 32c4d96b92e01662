// One register of float32 at a time: loads and stores of either type, and the exponential. Vectors of two registers
// would be kept in memory by GCC 12, and every sum with them.
#pragma once

#include "common.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed between functions: all of them are inlined

namespace mneme {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const bf16* p) {
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), BitVec) << 16);
}

inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
// Round to nearest even; a NaN stays one.
inline void store(bf16* p, Vec x) {
  const BitVec bits = (BitVec)x;
  const BitVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const BitVec chosen = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
  *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(chosen >> 16, HalfVec);
}

// The first `count` lanes; the others are 0.
template <class T>
inline Vec load(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  T padded[kLanes] = {};
  std::memcpy(padded, p, sizeof(T) * count);
  return load(padded);
}
template <class T>
inline void store(T* p, Vec x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, sizeof(T) * count);
}

inline float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
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

}  // namespace mneme
