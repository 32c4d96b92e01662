// The compiled functions of one operation each that `layers.cpp` calls one after the other, and what they are given.
#pragma once

#include "attention.h"

// Laid out like native/library.py: LinearWeight.
struct MnemeLinear {
  const void* packed;
  const float* bias;  // or null
  int64_t num_features;
  int64_t num_steps;  // of inputs: of two in bfloat16, else of one
  int32_t dtype;      // of x; y has it too, or float32 if `float_out`
  int32_t bits;       // of a weight's number, 8 or 4; 0: as many as `dtype` has
  const int32_t* order;  // [num_steps] of which input each code is; null: they follow each other. With `bits` alone
};

namespace mneme::attention {

// Laid out like native/kv.py: _Write.
struct Write {
  const void *k, *v;  // [T, num_kv_heads, head_dim]
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;  // in elements
  const int64_t *slots, *positions;  // [T]
  void *k_pages, *v_pages;           // [num_kv_heads, num_slots, kv_stride]
  const float* rope;                 // [num_positions, 2, rotary_half] cos, sin; null: no rotation
  int64_t num_rows, num_slots, num_positions;
  int32_t num_kv_heads, head_dim, rotary_half, dtype, num_threads;
  int32_t kv_dtype, kv_stride;  // see Step
};

}  // namespace mneme::attention

extern "C" {
void mneme_linear(const MnemeLinear* weight, const void* x, int64_t num_rows, int64_t x_stride, void* y,
                  int32_t float_out, int32_t num_threads);
void mneme_linear_quantized(const MnemeLinear* weight, const void* x, int64_t num_rows, int64_t x_stride, void* y,
                            int32_t float_out, int32_t num_threads);
int64_t mneme_write_kv(const mneme::attention::Write* write);
void mneme_attend(const mneme::attention::Step* step, const void* q, int64_t q_stride, const void* k, const void* v,
                  int64_t num_slots, void* out, float* lse, float* total, int32_t num_threads);
void mneme_rms_norm(const void* x, const void* weight, void* out, int64_t num_outer, int64_t outer_stride,
                    int64_t num_inner, int64_t inner_stride, int64_t count, float eps, int32_t dtype,
                    int32_t num_threads);
void mneme_add_rms_norm(void* hidden, const void* delta, const void* weight, void* out, int64_t num_rows,
                        int64_t count, float eps, int32_t dtype, int32_t num_threads);
void mneme_gated(const void* gate_up, void* out, int64_t num_rows, int64_t count, int32_t activation, int32_t dtype,
                 int32_t num_threads);
}
