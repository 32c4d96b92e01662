// New keys and values: into their slots, rotated on the way, and how far they are from those in the pool.
// Bytes: each read and written once, and 8 of the rope table per rotated pair. Flops: 6 per rotated pair.
#include <algorithm>
#include <type_traits>
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

constexpr float kLeastMagnitude = 0x1p-100f;  // of a row that int8 does not round to 0

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

// Rounds a row to int8 and writes the float32 scale behind it: the greatest magnitude / 127. A row that holds a NaN or an
// infinity has the scale NaN, and one so small that 127 / magnitude overflows is 0. arguments.py has the same in torch.
static void quantize(const float* __restrict x, int dim, int8_t* __restrict out) {
  uint32_t greatest = 0;  // as bits, which order magnitudes, infinity and NaN
#pragma omp simd reduction(max : greatest)
  for (int i = 0; i < dim; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    greatest = bits > greatest ? bits : greatest;
  }
  float magnitude;
  std::memcpy(&magnitude, &greatest, 4);
  const bool is_broken = greatest >= 0x7f800000u, is_zero = !is_broken && magnitude < kLeastMagnitude;
  const float scale = is_broken ? __builtin_nanf("") : is_zero ? 0.0f : magnitude / 127.0f;
  const float steps = is_broken || is_zero ? 0.0f : 127.0f / magnitude;  // per unit
  if (is_broken) {
    std::memset(out, 0, dim);
  } else {
    for (int i = 0; i < dim; ++i) out[i] = static_cast<int8_t>(static_cast<int32_t>(__builtin_rintf(x[i] * steps)));
  }
  std::memcpy(out + dim, &scale, sizeof(scale));
}

// row: room for a head in float32.
template <class Elem, class Kv>
static void write_head(const Write& w, int head, float* row) {
  const Elem* k = static_cast<const Elem*>(w.k) + head * w.k_head_stride;
  const Elem* v = static_cast<const Elem*>(w.v) + head * w.v_head_stride;
  Kv* k_pages = static_cast<Kv*>(w.k_pages) + head * w.num_slots * w.kv_stride;
  Kv* v_pages = static_cast<Kv*>(w.v_pages) + head * w.num_slots * w.kv_stride;
  for (int64_t i = 0; i < w.num_rows; ++i) {
    const Elem *key = k + i * w.k_row_stride, *value = v + i * w.v_row_stride;
    const int64_t at = w.slots[i] * w.kv_stride, position = w.rope ? w.positions[i] : 0;
    if constexpr (std::is_same_v<Elem, Kv>) {
      rotate_key(w, key, position, k_pages + at);
      std::copy_n(value, w.head_dim, v_pages + at);
    } else {
      rotate_key(w, key, position, row);
      quantize(row, w.head_dim, k_pages + at);
      for (int j = 0; j < w.head_dim; ++j) row[j] = to_float(value[j]);
      quantize(row, w.head_dim, v_pages + at);
    }
  }
}

template <class Kv>
static float squared_distance(const float* fresh, const Kv* cached, int dim) {
  const float scale = row_scale(cached, dim);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < dim; ++i) {
    const float difference = fresh[i] - to_float(cached[i]) * scale;
    sum += difference * difference;
  }
  return sum;
}

// One row's squared distances of keys and of values, over heads and dimensions. fresh: room for a head in float32.
template <class Elem, class Kv>
static void measure_row(const Write& w, int64_t row, float* fresh, float* out) {
  float of_keys = 0, of_values = 0;
  for (int head = 0; head < w.num_kv_heads; ++head) {
    const int64_t cached = (head * w.num_slots + w.slots[row]) * w.kv_stride;
    const Elem* value = static_cast<const Elem*>(w.v) + row * w.v_row_stride + head * w.v_head_stride;
    rotate_key(w, static_cast<const Elem*>(w.k) + row * w.k_row_stride + head * w.k_head_stride,
               w.rope ? w.positions[row] : 0, fresh);
    of_keys += squared_distance(fresh, static_cast<const Kv*>(w.k_pages) + cached, w.head_dim);
    for (int i = 0; i < w.head_dim; ++i) fresh[i] = to_float(value[i]);
    of_values += squared_distance(fresh, static_cast<const Kv*>(w.v_pages) + cached, w.head_dim);
  }
  out[0] = of_keys, out[1] = of_values;
}

// Calls with the types of what is written and of the pool.
template <class Body>
static void with_types(const Write& w, const Body& body) {
  const bool is_float = w.dtype == kFloat32;
  if (w.kv_dtype == kInt8) return is_float ? body(float(), int8_t()) : body(bf16(), int8_t());
  is_float ? body(float(), float()) : body(bf16(), bf16());
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
    std::vector<float> row(w.kv_dtype == mneme::kInt8 ? w.head_dim : 0);
    with_types(w, [&](auto elem, auto kv) { write_head<decltype(elem), decltype(kv)>(w, head, row.data()); });
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
      with_types(w, [&](auto elem, auto kv) {
        measure_row<decltype(elem), decltype(kv)>(w, row, fresh.data(), out + 2 * row);
      });
    }
  }
  return -1;
}
