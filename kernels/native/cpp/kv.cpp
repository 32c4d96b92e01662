// New keys and values: into their slots, rotated on the way, and how far they are from those in the pool.
// Bytes: each read and written once, and 8 of the rope table per rotated pair. Flops: 6 per rotated pair.
#include <algorithm>
#include <vector>

#include "calls.h"

namespace mneme::attention {

// a * b + c as torch's addcmul rounds it, so that both paths store the same keys.
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) { *p = to_bf16(x); }

template <class Elem, class Out>
static void rotate_key(const Write& w, const Elem* key, int64_t position, Out* __restrict out) {
  const int half = w.rope ? w.rotary_half : 0, dim = w.head_dim;
  const float *cos = w.rope + position * 2 * half, *sin = cos + half;
  for (int i = 0; i < half; ++i) {
    const float first = to_float(key[i]), second = to_float(key[half + i]);
    put(out + i, multiply_add(second, -sin[i], first * cos[i]));
    put(out + half + i, multiply_add(first, sin[i], second * cos[i]));
  }
  for (int i = 2 * half; i < dim; ++i) put(out + i, to_float(key[i]));
}

template <class Elem>
static void write_head(const Write& w, int head) {
  const Elem* k = static_cast<const Elem*>(w.k) + head * w.k_head_stride;
  const Elem* v = static_cast<const Elem*>(w.v) + head * w.v_head_stride;
  Elem* k_pages = static_cast<Elem*>(w.k_pages) + head * w.num_slots * w.head_dim;
  Elem* v_pages = static_cast<Elem*>(w.v_pages) + head * w.num_slots * w.head_dim;
  for (int64_t row = 0; row < w.num_rows; ++row) {
    rotate_key(w, k + row * w.k_row_stride, w.rope ? w.positions[row] : 0, k_pages + w.slots[row] * w.head_dim);
    std::copy_n(v + row * w.v_row_stride, w.head_dim, v_pages + w.slots[row] * w.head_dim);
  }
}

template <class Elem>
static float squared_distance(const float* fresh, const Elem* cached, int dim) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < dim; ++i) {
    const float difference = fresh[i] - to_float(cached[i]);
    sum += difference * difference;
  }
  return sum;
}

// One row's squared distances of keys and of values, over heads and dimensions. fresh: room for a head in float32.
template <class Elem>
static void measure_row(const Write& w, int64_t row, float* fresh, float* out) {
  float of_keys = 0, of_values = 0;
  for (int head = 0; head < w.num_kv_heads; ++head) {
    const int64_t cached = (head * w.num_slots + w.slots[row]) * w.head_dim;
    const Elem* value = static_cast<const Elem*>(w.v) + row * w.v_row_stride + head * w.v_head_stride;
    rotate_key(w, static_cast<const Elem*>(w.k) + row * w.k_row_stride + head * w.k_head_stride,
               w.rope ? w.positions[row] : 0, fresh);
    of_keys += squared_distance(fresh, static_cast<const Elem*>(w.k_pages) + cached, w.head_dim);
    for (int i = 0; i < w.head_dim; ++i) fresh[i] = to_float(value[i]);
    of_values += squared_distance(fresh, static_cast<const Elem*>(w.v_pages) + cached, w.head_dim);
  }
  out[0] = of_keys, out[1] = of_values;
}

// The first row whose slot or position does not exist, or -1.
static int64_t first_bad_row(const Write& w) {
  for (int64_t row = 0; row < w.num_rows; ++row) {
    if (w.slots[row] < 0 || w.slots[row] >= w.num_slots) return row;
    if (w.rope && (w.positions[row] < 0 || w.positions[row] >= w.num_positions)) return row;
  }
  return -1;
}

}  // namespace mneme::attention

using namespace mneme::attention;

// Returns the first row whose slot or position does not exist (and writes nothing then), or -1.
extern "C" int64_t mneme_write_kv(const Write* write) {
  const Write& w = *write;
  if (const int64_t row = first_bad_row(w); row >= 0) return row;
  const bool is_large = w.num_rows * w.num_kv_heads * w.head_dim >= 1 << 16;  // else a team costs more than it saves
  const int num_threads = is_large ? w.num_threads : 1;
  const auto write_one = [&](int head) {
    w.dtype == mneme::kFloat32 ? write_head<float>(w, head) : write_head<mneme::bf16>(w, head);
  };
  if (num_threads <= 1) {  // a team of one costs a microsecond
    for (int head = 0; head < w.num_kv_heads; ++head) write_one(head);
    return -1;
  }
#pragma omp parallel for num_threads(num_threads)
  for (int head = 0; head < w.num_kv_heads; ++head) write_one(head);
  return -1;
}

// Writes float32 [T, 2]: how far each row's key and value are from those in its slot. Returns as mneme_write_kv does.
extern "C" int64_t mneme_kv_deviation(const Write* rows, float* out) {
  const Write& w = *rows;
  if (const int64_t row = first_bad_row(w); row >= 0) return row;
#pragma omp parallel num_threads(w.num_rows * w.num_kv_heads * w.head_dim >= 1 << 16 ? w.num_threads : 1)
  {
    std::vector<float> fresh(w.head_dim);
#pragma omp for
    for (int64_t row = 0; row < w.num_rows; ++row) {
      w.dtype == mneme::kFloat32 ? measure_row<float>(w, row, fresh.data(), out + 2 * row)
                                 : measure_row<mneme::bf16>(w, row, fresh.data(), out + 2 * row);
    }
  }
  return -1;
}
