// A block of many query rows that goes over tiles of keys: its state, and how its inputs are packed. Query heads stand
// in lanes: a score is a key's cell, splat, times a vector of queries, so that keys are used where they lie in their
// pages, and the softmax runs lane by lane. Values are packed once per tile (zeros where a NaN is not everybody's) and
// multiplied with splat probabilities, head_dim in lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "attention.h"
#include "products.h"

namespace mneme::attention {

constexpr int kMostLanes = kMostColumns * kLanes;  // of a group: query heads whose scores are computed together
constexpr int kRowsOfValues = 4;                   // query heads per product with values
constexpr int kKeyStep = 8;                        // keys are padded to a multiple of this
constexpr int kRowsOfTwo = kMostColumns == 4 ? 8 : 4;  // keys per product with two vectors of queries

// Cells of one row of values, as float32.
template <class Elem>
void pack(const Elem* __restrict values, int dim, float* __restrict cells) {
  for (int i = 0; i < dim; ++i) cells[i] = to_float(values[i]);
}

inline void pack(const int8_t* __restrict values, int dim, float* cells) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(cells + i, load_float(values + i));
  for (; i < dim; ++i) cells[i] = values[i];
}

// Cells of two rows.
inline void pack(const int8_t* first, const int8_t* second, int dim, float* cells) {  // exact: 8 bits in each half
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const BitVec low = reinterpret_cast<BitVec>(load_float(first + i)) >> 16;
    store(cells + i, reinterpret_cast<Vec>(low | reinterpret_cast<BitVec>(load_float(second + i))));
  }
  for (; i < dim; ++i) {
    const bf16 pair[2] = {to_bf16(first[i]), to_bf16(second[i])};
    std::memcpy(cells + i, pair, 4);
  }
}
inline void pack(const bf16* first, const bf16* second, int dim, float* cells) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    store(cells + i, reinterpret_cast<Vec>(load_bits(first + i) | load_bits(second + i) << 16));
  }
  for (; i < dim; ++i) {
    const bf16 pair[2] = {first[i], second[i]};
    std::memcpy(cells + i, pair, 4);
  }
}

template <class Dot, class Elem, class Kv>
class Tiles {
 public:
  Tiles(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count);
  void run_through();
  void finish();

 private:
  static constexpr bool kWidens = sizeof(Kv) * Dot::kPerCell != 4;  // keys become cells tile by tile
  static constexpr bool kIsScaled = std::is_same_v<Kv, int8_t>;

  void look_ahead();
  void begin_run(int run);
  void pack_query(int lane, int row, int head);
  void add_tile();
  void pack_values();
  const Kv* usable_values(int n);
  void scale_scores(int cols, int num_keys);
  void find_keys();
  int visible_keys(int first_lane, int lanes) const;
  void scores(int first_lane, int cols, int num_keys);
  void cap(int cols, int num_keys);
  void load_masks(int page, int first_lane, uint64_t* bits) const;
  void hide(int first_lane, int cols, int num_keys);
  void softmax(int first_lane, int cols, int num_keys);
  void add_values(int first_lane, int cols, int num_keys);
  void add_broken_values(int first_lane, int lanes, int num_keys);
  bool sees(int lane, int n) const;
  void prefetch(int n) const;
  const Kv* row_of(const void* pool, int n) const {
    return static_cast<const Kv*>(pool) + kv_head_ * layer_.num_slots * step_.kv_stride + tile_->offset[n];
  }

  const Step& step_;
  const Layer& layer_;
  const int64_t kv_head_;
  const int piece_, first_, count_, num_groups_;
  const int dim_, padded_dim_, query_steps_;
  const int num_lanes_, padded_lanes_;
  RunRows rows_{}, next_rows_{};
  int next_run_;
  std::optional<KeyCursor> cursor_;  // of next_run_
  KeyTile tiles_[2], begin_;         // begin_: the first tile, which the next KV head begins with too
  KeyTile *tile_ = tiles_, *ahead_ = tiles_ + 1;  // the second is on its way into the cache
  int64_t ahead_head_ = 0;           // elements from this KV head's pool to that of ahead_
  int num_broken_ = 0;
  int broken_[kTileKeys];  // partial keys whose values hold a NaN or an infinity
  const float* key_[kTileKeys + kKeyStep];
  float key_scale_[kTileKeys + kKeyStep], value_scale_[kTileKeys];  // of the tile, if keys and values have scales
  // Scratch; L is padded_lanes_, D padded_dim_.
  float *query_, *out_;                 // cells [steps, lanes of a group], group by group; [num_lanes_, D]
  float *score_, *probability_;         // [keys, lanes of a group]; cells of the same
  float *value_, *wide_key_, *rotated_;  // cells [keys, D]; [keys, D] where keys are widened; [D]
  float* zeros_;                        // [D]
  float *top_, *weight_, *scale_;       // [L]
  int32_t* position_;                   // [L] effective positions of this run
};

template <class Dot, class Elem, class Kv>
Tiles<Dot, Elem, Kv>::Tiles(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count)
    : step_(step),
      layer_(layer),
      kv_head_(kv_head),
      piece_(piece),
      first_(first),
      count_(count),
      num_groups_(step.num_q_heads / step.num_kv_heads),
      dim_(step.head_dim),
      padded_dim_(round_up(step.head_dim, kLanes)),
      query_steps_(step.head_dim / Dot::kPerCell),
      num_lanes_(count * num_groups_),
      padded_lanes_(round_up(num_lanes_, kLanes)) {
  const size_t lanes = padded_lanes_, dim = padded_dim_, tile = kTileKeys;
  struct {
    float** part;
    size_t size;
  } parts[] = {{&query_, query_steps_ * lanes}, {&out_, round_up(num_lanes_, kRowsOfValues) * dim},
               {&score_, tile * kMostLanes},    {&probability_, tile * kMostLanes},
               {&value_, tile * dim},           {&wide_key_, kWidens ? tile * dim : 0},
               {&rotated_, dim},                {&zeros_, dim},
               {&top_, lanes},                  {&weight_, lanes},
               {&scale_, lanes},                {reinterpret_cast<float**>(&position_), lanes}};
  size_t total = 0;
  for (const auto& [part, size] : parts) total += size;
  float* next = thread_scratch(total);
  for (const auto& [part, size] : parts) {
    *part = next;
    next += size;
  }
  std::fill_n(query_, query_steps_ * lanes, 0.0f);
  std::fill_n(out_, round_up(num_lanes_, kRowsOfValues) * dim, 0.0f);
  if (padded_dim_ > dim_) std::fill_n(value_, tile * dim, 0.0f);
  std::fill_n(rotated_, 2 * dim, 0.0f);  // zeros_ too
  std::fill_n(top_, lanes, kUnseen);
  std::fill_n(weight_, lanes, 0.0f);
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::run_through() {
  int run = -1;
  next_run_ = step_.run_begin[piece_];
  look_ahead();
  begin_ = *ahead_;
  for (int n = 0; n < begin_.count; ++n) prefetch(n);
  while (ahead_->count > 0) {
    std::swap(tile_, ahead_);
    if (next_run_ != run) {
      run = next_run_;
      rows_ = next_rows_;
      begin_run(run);
    }
    look_ahead();
    const bool is_last = ahead_->count == 0;
    if (is_last && kv_head_ + 1 < step_.num_kv_heads) {
      *ahead_ = begin_;
      ahead_head_ = layer_.num_slots * step_.kv_stride;
    }
    add_tile();
    if (is_last) return;
  }
}

// The next tile, of this run or of a later one; an empty one behind the last.
template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::look_ahead() {
  ahead_->count = 0;
  while (!(cursor_ && cursor_->next(*ahead_))) {
    if (cursor_) ++next_run_;
    if (next_run_ == step_.run_begin[piece_ + 1]) return;
    next_rows_ = run_rows(step_, piece_, next_run_, first_, count_);
    cursor_.emplace(step_, next_rows_);
  }
}

// Asks for a row of the tile that comes next: pages lie anywhere, and no hardware foresees where. (Always inline: GCC
// takes a function that only prefetches for one without effect.)
template <class Dot, class Elem, class Kv>
__attribute__((always_inline)) inline void Tiles<Dot, Elem, Kv>::prefetch(int n) const {
  if (n >= ahead_->count) return;
  const int64_t at = kv_head_ * layer_.num_slots * step_.kv_stride + ahead_head_ + ahead_->offset[n];
  const char* key = reinterpret_cast<const char*>(static_cast<const Kv*>(layer_.k) + at);
  const char* value = reinterpret_cast<const char*>(static_cast<const Kv*>(layer_.v) + at);
  for (int i = 0; i < step_.kv_stride * static_cast<int>(sizeof(Kv)); i += kCacheLine) {
    __builtin_prefetch(key + i);
    __builtin_prefetch(value + i);
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::begin_run(int run) {
  for (int lane = 0; lane < padded_lanes_; ++lane) {
    const int row = std::min(lane, num_lanes_ - 1) / num_groups_;
    position_[lane] = effective_position(step_, piece_, run, first_ + row);
    if (lane < num_lanes_) pack_query(lane, step_.row[step_.row_begin[piece_] + first_ + row], lane % num_groups_);
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::pack_query(int lane, int row, int head) {
  const int64_t at = row * layer_.q_stride + (kv_head_ * num_groups_ + head) * dim_;
  rotate_query(step_, static_cast<const Elem*>(layer_.q) + at, position_[lane], rotated_);
  if constexpr (Dot::kPerCell == 2) {  // in place: a half overwrites what was read before it
    bf16* rounded = reinterpret_cast<bf16*>(rotated_);
    for (int i = 0; i < padded_dim_; i += kLanes) store(rounded + i, load(rotated_ + i));
  }
  const int steps = query_steps_, group = lane / kMostLanes * kMostLanes;
  const int64_t stride = std::min(kMostLanes, padded_lanes_ - group);
  float* cell = query_ + group * steps + lane - group;
  for (int step = 0; step < steps; ++step) std::memcpy(cell + step * stride, rotated_ + step, 4);
}

// A key as cells: its values as float32, or pairs of neighbours as bfloat16, which hold 8 bits exactly.
template <class Dot, class Kv>
void pack_key(const Kv* key, int dim, float* cells) {
  if constexpr (Dot::kPerCell == 1) {
    pack(key, dim, cells);
  } else {
    bf16* halves = reinterpret_cast<bf16*>(cells);
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(halves + i, load_float(key + i));
    for (; i < dim; ++i) halves[i] = to_bf16(to_float(key[i]));
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::find_keys() {
  for (int n = 0; n < round_up(tile_->count, kKeyStep); ++n) {
    const int real = std::min(n, tile_->count - 1);
    const Kv* key = row_of(layer_.k, real);
    if constexpr (kIsScaled) key_scale_[n] = row_scale(key, dim_);
    if constexpr (kWidens) {
      if (n == real) pack_key<Dot>(key, dim_, wide_key_ + n * padded_dim_);
      key_[n] = wide_key_ + real * padded_dim_;
    } else {
      key_[n] = reinterpret_cast<const float*>(key);
    }
  }
}

constexpr int kStrip = 64;  // values that are looked at together

// A key's values, or null for zeros: a NaN or an infinity of a key that not every row sees is added row by row.
template <class Dot, class Elem, class Kv>
const Kv* Tiles<Dot, Elem, Kv>::usable_values(int n) {
  const Kv* values = row_of(layer_.v, n);
  if constexpr (kIsScaled) {
    value_scale_[n] = row_scale(values, dim_);
    if (!tile_->is_partial[n] || std::isfinite(value_scale_[n])) return values;
    value_scale_[n] = 1;
    broken_[num_broken_++] = n;
    return nullptr;
  }
  if (!tile_->is_partial[n]) return values;
  using Bits = std::conditional_t<sizeof(Kv) == 2, uint16_t, uint32_t>;
  constexpr Bits kExponent = sizeof(Kv) == 2 ? 0x7F80 : 0x7F800000;  // all set: no finite number
  Bits bits[kStrip], is_broken = 0;
  for (int begin = 0; begin < dim_; begin += kStrip) {
    const int count = std::min(kStrip, dim_ - begin);
    std::memcpy(bits, values + begin, count * sizeof(Kv));
    for (int i = 0; i < count; ++i) is_broken |= (bits[i] & kExponent) == kExponent;
  }
  if (!is_broken) return values;
  broken_[num_broken_++] = n;
  return nullptr;
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::pack_values() {
  num_broken_ = 0;
  const Kv* zeros = reinterpret_cast<const Kv*>(zeros_);
  for (int n = 0; n < tile_->count; n += Dot::kPerCell) {
    float* cells = value_ + n / Dot::kPerCell * static_cast<int64_t>(padded_dim_);
    const Kv* first = usable_values(n);
    if (!first) first = zeros;
    if constexpr (Dot::kPerCell == 1) {
      pack(first, dim_, cells);
    } else {
      const Kv* second = n + 1 < tile_->count ? usable_values(n + 1) : nullptr;
      pack(first, second ? second : zeros, dim_, cells);
    }
  }
}

}  // namespace mneme::attention
