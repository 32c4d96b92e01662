// Types shared by the compiled CPU kernels. Vectors are compiler vectors of one register; only what the compiler cannot
// express (bf16 dot products) uses intrinsics, under #ifdef.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace mneme {

// What tensors hold; the numbers are part of the C interface (native/library.py). Int8: of keys and values alone.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

using bf16 = uint16_t;

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Round to nearest even; a NaN stays one.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace mneme
