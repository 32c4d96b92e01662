// Products of small tiles. A cell is what one vector lane multiplies at a step: a float, or a pair of bfloat16 whose
// two products are summed (AVX512_BF16).
#pragma once

#include "lanes.h"

namespace mneme::attention {

#if defined(__AVX512F__)
constexpr int kMostColumns = 4;  // 32 registers: 4 x 4 or 8 x 2 sums and what they are made of
#else
constexpr int kMostColumns = 2;
#endif

inline Vec splat_cell(const float* cell) {
  int32_t bits;
  std::memcpy(&bits, cell, 4);
  return reinterpret_cast<Vec>(splat(bits));
}

// Cells of one float.
struct FloatDot {
  static constexpr int kPerCell = 1;
  static Vec add(Vec sum, Vec a, Vec b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// Cells of two bfloat16.
struct PairDot {
  static constexpr int kPerCell = 2;
  static Vec add(Vec sum, Vec a, Vec b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 keeps the intrinsic's operands on the stack
    return sum;
  }

  // Cells of (first, second), each rounded to nearest even.
  static Vec cells(Vec first, Vec second) {
    const __m512bh halves = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(interleave, reinterpret_cast<__m512i>(halves)));
  }
};
#endif

// c[r][0 : Cols * kLanes] = old + sum over steps of a[r][step * a_step] * b[step], for Rows rows; `old` is 0, or
// c[r] * c_scale[r] where there is a c_scale. (Not inline: the loop needs all registers.)
template <class Dot, int Rows, int Cols>
__attribute__((noinline)) void product(const float* const* a, int64_t a_step, const float* b, int64_t b_stride,
                                       int steps, float* c, int64_t c_stride, const float* c_scale) {
  Vec sum[Rows][Cols];
  const float* row[Rows];
  for (int r = 0; r < Rows; ++r) {
    row[r] = a[r];
    for (int j = 0; j < Cols; ++j) {
      sum[r][j] = c_scale ? load(c + r * c_stride + j * kLanes) * c_scale[r] : Vec{};
    }
  }
  for (int step = 0; step < steps; ++step, b += b_stride) {
    Vec column[Cols];
    for (int j = 0; j < Cols; ++j) {
      column[j] = load(b + j * kLanes);
      keep(column[j]);
    }
    for (int r = 0; r < Rows; ++r) {
      const Vec cell = splat_cell(row[r] + step * a_step);
      for (int j = 0; j < Cols; ++j) sum[r][j] = Dot::add(sum[r][j], cell, column[j]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Cols; ++j) store(c + r * c_stride + j * kLanes, sum[r][j]);
  }
}

}  // namespace mneme::attention
