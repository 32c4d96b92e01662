// One register of floats per vector, whatever the CPU: compiler vectors of 16 (AVX-512), 8 (AVX2) or 4 lanes, and the
// few operations that kernels need beside arithmetic. Intrinsics stand only where the compiler has no words. Vectors of
// two registers would be kept in memory by GCC 12, and every sum with them.
#pragma once

#include <utility>

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

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t LooseIntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int8_t LooseByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t LooseHalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline IntVec load(const int32_t* p) { return *reinterpret_cast<const LooseIntVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
inline Vec splat(float x) { return x - Vec{}; }
inline IntVec splat(int32_t x) { return x - IntVec{}; }

// kLanes halves, each in the lower half of a lane.
inline BitVec load_bits(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 would widen in two halves
  return reinterpret_cast<BitVec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseHalfVec*>(p), BitVec);
#endif
}

// kLanes values as float32.
inline Vec load_float(const float* p) { return load(p); }
inline Vec load_float(const bf16* p) { return reinterpret_cast<Vec>(load_bits(p) << 16); }
inline Vec load_float(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 would widen in steps
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(wide));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseByteVec*>(p), Vec);
#endif
}

// Rounds to nearest even, as 32-bit lanes; a NaN stays one.
inline BitVec round_to_bf16(Vec x) {
  const BitVec bits = reinterpret_cast<BitVec>(x);
  const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40u;
}

inline void store(bf16* p, Vec x) {
  *reinterpret_cast<LooseHalfVec*>(p) = __builtin_convertvector(round_to_bf16(x), HalfVec);
}

// The first `count` lanes; the others are 0.
template <class T>
inline Vec load_float(const T* p, int64_t count) {
  if (count >= kLanes) return load_float(p);
  T padded[kLanes] = {};
  std::memcpy(padded, p, sizeof(T) * count);
  return load_float(padded);
}
template <class T>
inline void store(T* p, Vec x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, sizeof(T) * count);
}

// Two vectors of values as float32, in whatever order is cheapest to load.
struct VecPair {
  Vec first, second;
};
inline VecPair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
inline VecPair load_pair(const int8_t* p) { return {load_float(p), load_float(p + kLanes)}; }
inline VecPair load_pair(const bf16* p) {  // even and odd values: each is half of a 32-bit lane
  const IntVec both = *reinterpret_cast<const LooseIntVec*>(p);
  return {reinterpret_cast<Vec>(both << 16), reinterpret_cast<Vec>(both & splat(static_cast<int32_t>(0xffff0000u)))};
}

// 2 * kLanes floats into that order, and back; the pointer only names the type that is loaded.
template <class T>
inline void to_pair_order(const T*, const float* in, float* out) {
  std::memcpy(out, in, 8 * kLanes);
}
template <class T>
inline void from_pair_order(const T*, const float* in, float* out) {
  std::memcpy(out, in, 8 * kLanes);
}
inline void to_pair_order(const bf16*, const float* in, float* out) {
  for (int i = 0; i < kLanes; ++i) {
    out[i] = in[2 * i];
    out[kLanes + i] = in[2 * i + 1];
  }
}
inline void from_pair_order(const bf16*, const float* in, float* out) {
  for (int i = 0; i < kLanes; ++i) {
    out[2 * i] = in[i];
    out[2 * i + 1] = in[kLanes + i];
  }
}

// Makes the compiler keep a value in a register where it would rather load it again for every use.
inline void keep(Vec& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE2__)
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

// The larger one; a NaN in `x` leaves `best` as it is.
inline Vec larger(Vec best, Vec x) { return x > best ? x : best; }

// 2 ** x to a relative 1e-7, exactly 1 at 0; 0 below -126 (denormals are not worth their time), NaN for NaN.
inline Vec exp2(Vec x) {
  const Vec floor = splat(-200.0f);
  x = x < floor ? floor : x;  // -inf too; a NaN passes
#if defined(__AVX512F__)
  const Vec whole = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x), 0));
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to whole numbers
  const Vec shifted = x + magic;
  const Vec whole = shifted - magic;
#endif
  const Vec f = x - whole;  // in [-0.5, 0.5]
  Vec p = splat(1.48042615e-4f);
  p = p * f + splat(1.33779633e-3f);
  p = p * f + splat(9.62022319e-3f);
  p = p * f + splat(5.55040203e-2f);
  p = p * f + splat(2.40226388e-1f);
  p = p * f + splat(6.93147182e-1f);
  p = p * f + splat(1.0f);
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(whole)));
#else
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) - reinterpret_cast<IntVec>(magic);
  const Vec scaled = p * reinterpret_cast<Vec>((exponent + 127) << 23);
  return x < splat(-126.0f) ? Vec{} : (x > splat(127.5f) ? splat(__builtin_inff()) : scaled);
#endif
}

// tanh with an absolute error of 1e-7; NaN for NaN.
inline Vec tanh(Vec x) {
  const Vec limit = splat(15.0f);
  x = x > limit ? limit : (x < -limit ? -limit : x);
  const Vec e = exp2(x * splat(2.8853900817779268f));
  return (e - 1.0f) / (e + 1.0f);
}

inline float horizontal_max(Vec x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline float horizontal_sum(Vec x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

#if defined(__clang__)
#define MNEME_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MNEME_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IntVec{__VA_ARGS__}))
#endif

// One level of a transposing sum: lane i adds two lanes of `a` where bit `Step` of i is clear, else two of `b`.
template <int Step, int... I>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return MNEME_SHUFFLE(a, b, ((I & Step) ? kLanes + I : I)...) +
         MNEME_SHUFFLE(a, b, ((I & Step) ? kLanes + (I ^ Step) : (I ^ Step))...);
}

template <int Step>
inline void fold_all(Vec* x) {
  for (int i = 0; i < Step; ++i) x[i] = fold<Step>(x[i], x[i + Step], std::make_integer_sequence<int, kLanes>());
  if constexpr (Step > 1) fold_all<Step / 2>(x);
}

// Lane i of the result is the sum of the lanes of x[i], for kLanes vectors; overwrites x.
inline Vec lane_sums(Vec* x) {
  fold_all<kLanes / 2>(x);
  return x[0];
}

}  // namespace mneme
