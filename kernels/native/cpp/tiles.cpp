// Many query rows over tiles of keys: scores, softmax, values.
#include "tiles.h"

#include <cmath>
#include <type_traits>

namespace mneme::attention {

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::add_tile() {
  find_keys();
  pack_values();
  for (int first = 0; first < padded_lanes_; first += kMostLanes) {
    const int cols = std::min(kMostLanes, padded_lanes_ - first) / kLanes;
    const int num_keys = visible_keys(first, cols * kLanes);
    if (num_keys == 0) continue;
    scores(first, cols, num_keys);
    if (kIsScaled) scale_scores(cols, num_keys);
    if (step_.soft_cap > 0) cap(cols, num_keys);
    if (tile_->is_mixed) hide(first, cols, num_keys);
    softmax(first, cols, num_keys);
    add_values(first, cols, num_keys);
    if (num_broken_) add_broken_values(first, std::min(cols * kLanes, num_lanes_ - first), num_keys);
  }
}

// How many of the tile's keys these lanes need: none behind the last one that a lane sees.
template <class Dot, class Elem, class Kv>
int Tiles<Dot, Elem, Kv>::visible_keys(int first_lane, int lanes) const {
  int count = tile_->count;
  if (!tile_->is_mixed) return count;
  const int highest = *std::max_element(position_ + first_lane, position_ + first_lane + lanes);
  while (count > 0 && tile_->position[count - 1] > highest) --count;
  return count;
}

// score_ [keys, cols * kLanes]
template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::scores(int first_lane, int cols, int num_keys) {
  const float* query = query_ + first_lane * query_steps_;
  const int stride = cols * kLanes;
  for (int n = 0; n < num_keys; n += kKeyStep) {
    for (int i = 0; i < kKeyStep && first_lane == 0; ++i) prefetch(n + i);
    float* score = score_ + n * stride;
    if (cols == 1) {
      product<Dot, 8, 1>(key_ + n, 1, query, stride, query_steps_, score, stride, nullptr);
    } else if (cols == 2) {
      product<Dot, kRowsOfTwo, 2>(key_ + n, 1, query, stride, query_steps_, score, stride, nullptr);
      if constexpr (kRowsOfTwo == 4) {
        product<Dot, 4, 2>(key_ + n + 4, 1, query, stride, query_steps_, score + 4 * stride, stride, nullptr);
      }
    } else if constexpr (kMostColumns == 4) {
      for (int half = 0; half < kKeyStep; half += 4) {
        float* at = score + half * stride;
        if (cols == 3) {
          product<Dot, 4, 3>(key_ + n + half, 1, query, stride, query_steps_, at, stride, nullptr);
        } else {
          product<Dot, 4, 4>(key_ + n + half, 1, query, stride, query_steps_, at, stride, nullptr);
        }
      }
    }
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::scale_scores(int cols, int num_keys) {
  float* score = score_;
  for (int n = 0; n < num_keys; ++n) {
    for (int j = 0; j < cols; ++j, score += kLanes) store(score, load(score) * key_scale_[n]);
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::cap(int cols, int num_keys) {
  for (int i = 0; i < num_keys * cols * kLanes; i += kLanes) store(score_ + i, tanh(load(score_ + i)) * step_.soft_cap);
}

template <class Dot, class Elem, class Kv>
bool Tiles<Dot, Elem, Kv>::sees(int lane, int n) const {
  const int at = tile_->position[n], position = position_[lane], page = tile_->page[n];
  return at <= position && at > position - step_.window &&
         is_shown(step_, rows_.run, first_ + lane / num_groups_, page, tile_->slot[n] % step_.page_size);
}

// The masks of a page, of these lanes' rows.
template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::load_masks(int page, int first_lane, uint64_t* bits) const {
  const int64_t* mask = step_.mask + step_.mask_begin[rows_.run] + page;
  const int32_t* number = step_.mask_number + step_.delta_begin[rows_.run] + first_;
  for (int i = 0; i < kLanes; ++i) {
    const int lane = std::min(first_lane + i, num_lanes_ - 1);
    bits[i] = mask[static_cast<int64_t>(number[lane / num_groups_]) * step_.mask_stride[rows_.run]];
  }
}

// Scores of pairs that are invisible become -inf, whatever they were.
template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::hide(int first_lane, int cols, int num_keys) {
  const bool has_masks = step_.mask_stride[rows_.run] != 0;
  for (int j = 0; j < cols; ++j) {
    const int lane = first_lane + j * kLanes;
    const IntVec position = load(position_ + lane);
    uint64_t bits[kLanes];
    int page = -1;
    for (int n = 0; n < num_keys; ++n) {
      if (!tile_->is_partial[n]) continue;
      const IntVec at = splat(tile_->position[n]);
      IntVec visible = (at <= position) & (at > position - step_.window);
      if (has_masks) {
        if (tile_->page[n] != page) load_masks(page = tile_->page[n], lane, bits);
        const int offset = tile_->slot[n] % step_.page_size;
        alignas(64) int32_t shown[kLanes];
        for (int i = 0; i < kLanes; ++i) shown[i] = -static_cast<int32_t>(bits[i] >> offset & 1);
        visible &= load(shown);
      }
      float* score = score_ + (n * cols + j) * kLanes;
      store(score, visible ? load(score) : splat(-INFINITY));
    }
  }
}

// Scores become probabilities relative to the new maximum, times the values' scales if there are scales; scale_ is what
// the old sums are to be multiplied with.
template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::softmax(int first_lane, int cols, int num_keys) {
  const int stride = cols * kLanes;
  for (int j = 0; j < cols; ++j) {
    const int lane = first_lane + j * kLanes;
    const float* score = score_ + j * kLanes;
    const Vec old = load(top_ + lane);
    Vec top = old, sum = {};
    for (int n = 0; n < num_keys; ++n) top = larger(top, load(score + n * stride));
    float* cell = probability_ + j * kLanes;
    for (int n = 0; n < num_keys; n += Dot::kPerCell, cell += stride) {
      const Vec first = exp2(load(score + n * stride) - top);
      sum += first;
      const auto weighed = [this](Vec probability, int key) {
        return kIsScaled && key < tile_->count ? probability * value_scale_[key] : probability;
      };
      if constexpr (Dot::kPerCell == 1) {
        store(cell, weighed(first, n));
      } else {
        const Vec second = n + 1 < num_keys ? exp2(load(score + (n + 1) * stride) - top) : Vec{};
        sum += second;
        store(cell, Dot::cells(weighed(first, n), weighed(second, n + 1)));
      }
    }
    const Vec scale = exp2(old - top);
    store(scale_ + lane, scale);
    store(top_ + lane, top);
    store(weight_ + lane, load(weight_ + lane) * scale + sum);
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::add_values(int first_lane, int cols, int num_keys) {
  const int stride = cols * kLanes, steps = (num_keys + Dot::kPerCell - 1) / Dot::kPerCell;
  const int end = std::min(first_lane + stride, num_lanes_);
  for (int lane = first_lane; lane < end; lane += kRowsOfValues) {
    const float* row[kRowsOfValues];
    for (int r = 0; r < kRowsOfValues; ++r) row[r] = probability_ + lane - first_lane + r;
    float* out = out_ + static_cast<int64_t>(lane) * padded_dim_;
    const float* scale = scale_ + lane;
    const int dim = padded_dim_;
    int i = 0;
    for (; i + kMostColumns * kLanes <= dim; i += kMostColumns * kLanes) {
      product<Dot, kRowsOfValues, kMostColumns>(row, stride, value_ + i, dim, steps, out + i, dim, scale);
    }
    for (; i < dim; i += kLanes) {
      product<Dot, kRowsOfValues, 1>(row, stride, value_ + i, dim, steps, out + i, dim, scale);
    }
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::add_broken_values(int first_lane, int lanes, int num_keys) {
  const int stride = round_up(lanes, kLanes);
  for (int i = 0; i < num_broken_ && broken_[i] < num_keys; ++i) {
    const int n = broken_[i];
    const Kv* values = row_of(layer_.v, n);
    const float value_scale = row_scale(values, dim_);
    for (int lane = first_lane; lane < first_lane + lanes; ++lane) {
      if (!sees(lane, n)) continue;
      const float* cell = probability_ + n / Dot::kPerCell * stride + lane - first_lane;
      const bf16* halves = reinterpret_cast<const bf16*>(cell);
      const float weight = Dot::kPerCell == 1 ? *cell : to_float(halves[n % Dot::kPerCell]);
      float* out = out_ + static_cast<int64_t>(lane) * padded_dim_;
      for (int d = 0; d < dim_; ++d) out[d] += weight * (to_float(values[d]) * value_scale);
    }
  }
}

template <class Dot, class Elem, class Kv>
void Tiles<Dot, Elem, Kv>::finish() {
  const bool is_last = piece_ >= step_.num_shared;
  for (int lane = 0; lane < num_lanes_; ++lane) {
    const int row = step_.row[step_.row_begin[piece_] + first_ + lane / num_groups_];
    const int head = static_cast<int>(kv_head_) * num_groups_ + lane % num_groups_;
    const Partial part{out_ + static_cast<int64_t>(lane) * padded_dim_, top_[lane], weight_[lane]};
    merge_part(step_, layer_, row, head, part, is_last);
  }
}

namespace {

template <class Dot, class Elem, class Kv>
void run(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count) {
  Tiles<Dot, Elem, Kv> tiles(step, layer, kv_head, piece, first, count);
  tiles.run_through();
  tiles.finish();
}

}  // namespace

template <class Elem, class Kv>
void attend_tiles(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Elem, bf16>) {
    if (step.head_dim % 2 == 0) return run<PairDot, Elem, Kv>(step, layer, kv_head, piece, first, count);
  }
#endif
  run<FloatDot, Elem, Kv>(step, layer, kv_head, piece, first, count);
}
template void attend_tiles<float, float>(const Step&, const Layer&, int, int, int, int);
template void attend_tiles<float, int8_t>(const Step&, const Layer&, int, int, int, int);
template void attend_tiles<bf16, bf16>(const Step&, const Layer&, int, int, int, int);
template void attend_tiles<bf16, int8_t>(const Step&, const Layer&, int, int, int, int);

}  // namespace mneme::attention
