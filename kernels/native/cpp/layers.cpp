// The layers of a decoder whose MLPs are dense, as many in one call as nobody looks into: projections, attention, norms,
// MLPs. They are the functions that Python calls one by one elsewhere, so results are the same bits.
#include "calls.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

namespace mneme {
namespace {

using attention::Step;
using attention::Write;

struct Norm {
  const void* weight;  // null: there is none
  float eps;
};

// native/layers.py has the same structures.
struct LayerWeights {
  const MnemeLinear *qkv, *o, *gate_up, *down;
  Norm q, k;       // of each head
  Norm mlp, next;  // behind attention, and behind the MLP: the next layer's, or the last one
  int32_t activation;
};

struct Run {
  const LayerWeights* layers;
  const Step* const* steps;  // by layer
  int64_t num_layers, hidden_size, num_slots, num_sampled;
  int64_t pool_bytes;       // of a layer's keys
  char *k_pages, *v_pages;  // [num_layers, num_kv_heads, num_slots, kv_stride]
  const int64_t *slots, *positions;  // [T] where each row's key is written, and for which position it is rotated
  const int64_t* sampled_rows;       // [num_sampled]
  char *hidden, *normed;             // [T, hidden_size] the sum over all layers so far, and its norm
  void* out;                         // [num_sampled, hidden_size] behind the last norm
  int32_t num_threads;
};

// What is between the operations of one layer.
class Scratch {
 public:
  Scratch(const Run& run, int64_t first, int64_t last, int64_t size) {
    const Step& s = *run.steps[first];
    const int64_t q_size = s.num_q_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim;
    int64_t inner_size = 0;
    bool has_norms = false, has_total = false;
    for (int64_t index = first; index < last; ++index) {
      inner_size = std::max(inner_size, run.layers[index].gate_up->num_features / 2);
      has_norms |= run.layers[index].q.weight != nullptr;
      has_total |= run.steps[index]->num_shared > 0;
    }
    const int64_t bytes[] = {
        (q_size + 2 * kv_size) * size, q_size * size,  run.hidden_size * size,         has_norms * q_size * size,
        has_norms * kv_size * size,    2 * inner_size * size, inner_size * size, s.num_q_heads * int64_t{4},
        has_total * q_size * 4};
    char** parts[] = {&heads, &attended, &mixed, &q_heads, &k_heads, &gate_up, &inner, &lse, &total};
    int64_t ends[9], end = 0;
    for (int i = 0; i < 9; ++i) ends[i] = end += (bytes[i] * s.num_rows + 63) / 64 * 64;
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, std::max<int64_t>(end, 64))));
    for (int i = 0; i < 9; ++i) *parts[i] = memory_.get() + (i ? ends[i - 1] : 0);
  }

  char *heads, *attended;    // [T, q, k and v of a row]; [T, q of a row]
  char *mixed;               // [T, hidden_size] what is added to the hidden states
  char *q_heads, *k_heads;   // behind their norms, if there are such norms
  char *gate_up, *inner;     // [T, 2 I]; [T, I]
  char *lse, *total;         // floats of `attend`

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
};

struct Heads {
  const char* at;
  int64_t stride;  // of a row, in elements
};

// Heads of a joint projection, or a copy of them behind their norm.
Heads normed_heads(const Run& run, const Step& s, Norm norm, Heads heads, int64_t num_heads, char* out) {
  if (!norm.weight) return heads;
  mneme_rms_norm(heads.at, norm.weight, out, s.num_rows, heads.stride, num_heads, s.head_dim, s.head_dim, norm.eps,
                 s.dtype, run.num_threads);
  return {out, num_heads * s.head_dim};
}

// Returns the first row whose slot or position does not exist, or -1.
int64_t attend_layer(const Run& run, const Scratch& scratch, int64_t index, int64_t size) {
  const LayerWeights& layer = run.layers[index];
  const Step& s = *run.steps[index];
  const int64_t q_size = s.num_q_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim;
  const int64_t joint = q_size + 2 * kv_size;
  mneme_linear(layer.qkv, run.normed, s.num_rows, run.hidden_size, scratch.heads, 0, run.num_threads);
  const Heads q = normed_heads(run, s, layer.q, {scratch.heads, joint}, s.num_q_heads, scratch.q_heads);
  const Heads k = normed_heads(run, s, layer.k, {scratch.heads + q_size * size, joint}, s.num_kv_heads, scratch.k_heads);
  char *k_pages = run.k_pages + index * run.pool_bytes, *v_pages = run.v_pages + index * run.pool_bytes;
  const Write write{k.at, scratch.heads + (q_size + kv_size) * size, k.stride, s.head_dim, joint, s.head_dim, run.slots,
                    run.positions, k_pages, v_pages, s.rope, s.num_rows, run.num_slots, s.num_positions,
                    s.num_kv_heads, s.head_dim, s.rotary_half, s.dtype, run.num_threads, s.kv_dtype, s.kv_stride};
  if (const int64_t row = mneme_write_kv(&write); row >= 0) return row;
  mneme_attend(&s, q.at, q.stride, k_pages, v_pages, run.num_slots, scratch.attended, reinterpret_cast<float*>(scratch.lse),
               reinterpret_cast<float*>(scratch.total),
               run.num_threads);
  return -1;
}

void gather(const Run& run, const char* rows, int64_t row_bytes, char* out) {
  for (int64_t i = 0; i < run.num_sampled; ++i)
    std::memcpy(out + i * row_bytes, rows + run.sampled_rows[i] * row_bytes, row_bytes);
}

// Above the last attention only sampled rows matter.
void finish_layer(const Run& run, const Scratch& scratch, int64_t index, int64_t size) {
  const LayerWeights& layer = run.layers[index];
  const Step& s = *run.steps[index];
  const int64_t q_size = s.num_q_heads * s.head_dim, inner_size = layer.gate_up->num_features / 2;
  const bool is_last = index == run.num_layers - 1;
  int64_t num_rows = s.num_rows;
  char *hidden = run.hidden, *normed = run.normed, *attended = scratch.attended;
  if (is_last) {
    num_rows = run.num_sampled;
    gather(run, scratch.attended, q_size * size, scratch.heads);
    gather(run, run.hidden, run.hidden_size * size, run.normed);
    std::swap(hidden, normed);
    attended = scratch.heads;
  }
  mneme_linear(layer.o, attended, num_rows, q_size, scratch.mixed, 0, run.num_threads);
  mneme_add_rms_norm(hidden, scratch.mixed, layer.mlp.weight, normed, num_rows, run.hidden_size, layer.mlp.eps, s.dtype,
                     run.num_threads);
  mneme_linear(layer.gate_up, normed, num_rows, run.hidden_size, scratch.gate_up, 0, run.num_threads);
  mneme_gated(scratch.gate_up, scratch.inner, num_rows, inner_size, layer.activation, s.dtype, run.num_threads);
  mneme_linear(layer.down, scratch.inner, num_rows, inner_size, scratch.mixed, 0, run.num_threads);
  mneme_add_rms_norm(hidden, scratch.mixed, layer.next.weight, is_last ? run.out : normed, num_rows, run.hidden_size,
                     layer.next.eps, s.dtype, run.num_threads);
}

}  // namespace
}  // namespace mneme

// Layers [first, last). Returns the first row whose slot or position does not exist (nothing was written then), or -1.
extern "C" int64_t mneme_layers(const mneme::Run* run, int64_t first, int64_t last) {
  const int64_t size = run->steps[0]->dtype == mneme::kFloat32 ? 4 : 2;
  const mneme::Scratch scratch(*run, first, last, size);
  for (int64_t index = first; index < last; ++index) {
    if (const int64_t row = mneme::attend_layer(*run, scratch, index, size); row >= 0) return row;
    mneme::finish_layer(*run, scratch, index, size);
  }
  return -1;
}
