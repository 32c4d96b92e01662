// Few query heads over keys: every head's dot product with every key, head_dim in lanes, straight from the pages. A
// decode step's private pages run near memory's rate here.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

namespace mneme::attention {
namespace {

constexpr int kMostHeads = 4;        // that go over a tile together
constexpr int kPair = 2 * kLanes;    // values that are loaded together

// One query row and some KV heads, one *unit* (up to kMostHeads query heads of one KV head) after the other; a unit's
// first tile is asked for while the last one of the unit before is at work. Queries and sums are kept in the order in
// which pairs of vectors are loaded.
template <class Elem, class Kv>
class Rows {
 public:
  Rows(const Step& step, const Layer& layer, HeadRange kv_heads, int piece, int first);
  void run_through();

 private:
  struct Unit {
    int number, run;
    const Kv *keys, *values;  // of its KV head
  };
  Unit unit(int number, int run) const;
  void look_ahead();
  void begin_unit();
  void load_queries();
  void finish_unit();
  template <int Heads, int Dim>
  void add_tile();
  template <int Heads, int Dim>
  void scores();
  template <int Heads, int Pairs>
  void add_values(int from, bool is_first);
  void softmax(int head);
  void prefetch(const Kv* pool, int n) const;
  void add_tile();

  const Step& step_;
  const Layer& layer_;
  const HeadRange kv_heads_;
  const int piece_, first_, row_, num_groups_, units_per_head_, num_units_, dim_;
  KeyTile tiles_[2];
  KeyTile *tile_ = tiles_, *ahead_ = tiles_ + 1;  // the second is on its way into the cache
  Unit at_, next_;                                // to which they belong
  RunRows next_rows_;
  std::optional<KeyCursor> cursor_;               // of next_
  int head_, num_heads_, position_;               // of at_: query heads, effective position
  float *query_, *out_, *unordered_;              // [num_heads, dim] twice, [dim]
  static constexpr bool kIsScaled = std::is_same_v<Kv, int8_t>;
  alignas(64) float score_[kMostHeads][kTileKeys];
  alignas(64) float key_scale_[kTileKeys], value_scale_[kTileKeys];  // of the tile, if keys and values have scales
  float top_[kMostHeads], weight_[kMostHeads], scale_[kMostHeads];
};

template <class Elem, class Kv>
Rows<Elem, Kv>::Rows(const Step& step, const Layer& layer, HeadRange kv_heads, int piece, int first)
    : step_(step),
      layer_(layer),
      kv_heads_(kv_heads),
      piece_(piece),
      first_(first),
      row_(step.row[step.row_begin[piece] + first]),
      num_groups_(step.num_q_heads / step.num_kv_heads),
      units_per_head_((num_groups_ + kMostHeads - 1) / kMostHeads),
      num_units_((kv_heads.end - kv_heads.begin) * units_per_head_),
      dim_(step.head_dim) {
  query_ = thread_scratch((2 * kMostHeads + 1) * static_cast<size_t>(dim_));
  out_ = query_ + kMostHeads * dim_;
  unordered_ = out_ + kMostHeads * dim_;
}

template <class Elem, class Kv>
typename Rows<Elem, Kv>::Unit Rows<Elem, Kv>::unit(int number, int run) const {
  const int64_t pool = (kv_heads_.begin + number / units_per_head_) * layer_.num_slots * step_.kv_stride;
  return {number, run, static_cast<const Kv*>(layer_.k) + pool, static_cast<const Kv*>(layer_.v) + pool};
}

// The next tile of this unit's run, of its next run or of the next unit; an empty one behind the last.
template <class Elem, class Kv>
void Rows<Elem, Kv>::look_ahead() {
  ahead_->count = 0;
  while (next_.number < num_units_ && !(cursor_ && cursor_->next(*ahead_))) {
    if (cursor_) {
      const bool is_last_run = next_.run + 1 == step_.run_begin[piece_ + 1];
      next_ = is_last_run ? unit(next_.number + 1, step_.run_begin[piece_]) : unit(next_.number, next_.run + 1);
    }
    next_rows_ = run_rows(step_, piece_, next_.run, first_, 1);
    cursor_.emplace(step_, next_rows_);
  }
}

template <class Elem, class Kv>
void Rows<Elem, Kv>::run_through() {
  next_ = unit(0, step_.run_begin[piece_]);
  look_ahead();
  bool has_begun = false;
  while (ahead_->count > 0) {
    std::swap(tile_, ahead_);
    const bool is_new_unit = !has_begun || next_.number != at_.number;
    const bool is_new_run = is_new_unit || next_.run != at_.run;
    if (is_new_unit && has_begun) finish_unit();
    at_ = next_;
    position_ = next_rows_.lowest;
    if (is_new_unit) begin_unit();
    if (is_new_run) load_queries();
    has_begun = true;
    look_ahead();
    add_tile();
  }
  if (has_begun) return finish_unit();
  for (int number = 0; number < num_units_; ++number) {  // the row sees nothing
    at_ = unit(number, 0);
    begin_unit();
    finish_unit();
  }
}

template <class Elem, class Kv>
void Rows<Elem, Kv>::begin_unit() {
  const int group = at_.number % units_per_head_ * kMostHeads;
  head_ = (kv_heads_.begin + at_.number / units_per_head_) * num_groups_ + group;
  num_heads_ = std::min(kMostHeads, num_groups_ - group);
  std::fill_n(out_, num_heads_ * dim_, 0.0f);
  std::fill_n(top_, kMostHeads, kUnseen);
  std::fill_n(weight_, kMostHeads, 0.0f);
}

template <class Elem, class Kv>
void Rows<Elem, Kv>::load_queries() {
  for (int h = 0; h < num_heads_; ++h) {
    const int64_t at = row_ * layer_.q_stride + (head_ + h) * static_cast<int64_t>(dim_);
    rotate_query(step_, static_cast<const Elem*>(layer_.q) + at, position_, unordered_);
    float* query = query_ + h * dim_;
    const int end = dim_ / kPair * kPair;  // the last values, where they fill no pair, stay in order
    for (int i = 0; i < end; i += kPair) to_pair_order(at_.keys, unordered_ + i, query + i);
    std::copy(unordered_ + end, unordered_ + dim_, query + end);
  }
}

template <class Elem, class Kv>
void Rows<Elem, Kv>::add_tile() {
  const auto with_heads = [this](auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    if (dim_ == 64) return add_tile<kHeads, 64>();
    if (dim_ == 128) return add_tile<kHeads, 128>();
    add_tile<kHeads, 0>();
  };
  if (num_heads_ == 1) return with_heads(std::integral_constant<int, 1>());
  if (num_heads_ == 2) return with_heads(std::integral_constant<int, 2>());
  if (num_heads_ == 3) return with_heads(std::integral_constant<int, 3>());
  with_heads(std::integral_constant<int, 4>());
}

// Dim: head_dim where it is known to the compiler, else 0.
template <class Elem, class Kv>
template <int Heads, int Dim>
void Rows<Elem, Kv>::add_tile() {
  constexpr int kMostPairs = kLanes < 16 ? 1 : Heads > 2 || Dim == 64 ? 2 : 4;  // whose sums fit the registers
  const int dim = Dim ? Dim : dim_;
  for (int n = 0; kIsScaled && n < round_up(tile_->count, kLanes); ++n) {
    const int64_t at = tile_->offset[std::min(n, tile_->count - 1)];
    key_scale_[n] = row_scale(at_.keys + at, dim_);
    value_scale_[n] = row_scale(at_.values + at, dim_);
  }
  scores<Heads, Dim>();
  for (int h = 0; h < Heads; ++h) softmax(h);
  int i = 0;
  for (; i + kMostPairs * kPair <= dim; i += kMostPairs * kPair) add_values<Heads, kMostPairs>(i, i == 0);
  for (; i + kPair <= dim; i += kPair) add_values<Heads, 1>(i, i == 0);
  if (i < dim) add_values<Heads, 0>(i, i == 0);
}

// Asks for a row of the tile that comes next: pages lie anywhere, and no hardware foresees where. (Always inline: GCC
// takes a function that only prefetches for one without effect.)
template <class Elem, class Kv>
__attribute__((always_inline)) inline void Rows<Elem, Kv>::prefetch(const Kv* pool, int n) const {
  if (n >= ahead_->count) return;
  const char* row = reinterpret_cast<const char*>(pool + ahead_->offset[n]);
  for (int i = 0; i < dim_ * static_cast<int>(sizeof(Kv)); i += kCacheLine) __builtin_prefetch(row + i);
}

template <class Elem, class Kv>
template <int Heads, int Dim>
void Rows<Elem, Kv>::scores() {
  constexpr int kKeys = Heads > 2 || kLanes < 16 ? 2 : 4;  // whose sums run side by side
  const float* const query = query_;
  const int dim = Dim ? Dim : dim_;
  for (int begin = 0; begin < tile_->count; begin += kLanes) {
    Vec product[Heads][kLanes];
    for (int n = 0; n < kLanes; n += kKeys) {
      const Kv* key[kKeys];
      for (int k = 0; k < kKeys; ++k) {
        key[k] = at_.keys + tile_->offset[std::min(begin + n + k, tile_->count - 1)];
        prefetch(next_.keys, begin + n + k);
      }
      Vec sum[Heads][kKeys] = {};
      int i = 0;
      for (; i + kPair <= dim; i += kPair) {
        VecPair x[kKeys];
        for (int k = 0; k < kKeys; ++k) x[k] = load_pair(key[k] + i);
        for (int h = 0; h < Heads; ++h) {
          const Vec first = load(query + h * dim + i), second = load(query + h * dim + i + kLanes);
          for (int k = 0; k < kKeys; ++k) sum[h][k] += first * x[k].first;
          for (int k = 0; k < kKeys; ++k) sum[h][k] += second * x[k].second;
        }
      }
      for (int k = 0; k < kKeys && i < dim; ++k) {
        const Vec x = load_float(key[k] + i);
        for (int h = 0; h < Heads; ++h) sum[h][k] += load(query + h * dim + i) * x;
      }
      for (int h = 0; h < Heads; ++h) {
        for (int k = 0; k < kKeys; ++k) product[h][n + k] = sum[h][k];
      }
    }
    for (int h = 0; h < Heads; ++h) {
      const Vec sums = lane_sums(product[h]);
      store(score_[h] + begin, kIsScaled ? sums * load(key_scale_ + begin) : sums);
    }
  }
}

// Scores of one head become probabilities relative to the new maximum, times the values' scales if there are scales.
template <class Elem, class Kv>
void Rows<Elem, Kv>::softmax(int h) {
  float* score = score_[h];
  const int padded = round_up(tile_->count, kLanes);
  for (int n = 0; step_.soft_cap > 0 && n < padded; n += kLanes) store(score + n, tanh(load(score + n)) * step_.soft_cap);
  for (int n = tile_->count; n < padded; ++n) score[n] = -INFINITY;
  Vec top = splat(top_[h]), sum = {};
  for (int n = 0; n < padded; n += kLanes) top = larger(top, load(score + n));
  const float old = top_[h], now = horizontal_max(top);
  for (int n = 0; n < padded; n += kLanes) {
    const Vec probability = exp2(load(score + n) - splat(now));
    sum += probability;
    store(score + n, kIsScaled ? probability * load(value_scale_ + n) : probability);
  }
  scale_[h] = old == now ? 1 : std::exp2(old - now);
  top_[h] = now;
  weight_[h] = weight_[h] * scale_[h] + horizontal_sum(sum);
}

// The values from `from` on: so many pairs of vectors, or (0) one vector.
template <class Elem, class Kv>
template <int Heads, int Pairs>
void Rows<Elem, Kv>::add_values(int from, bool is_first) {
  constexpr int kVecs = Pairs ? 2 * Pairs : 1;
  float* const out = out_ + from;
  const Kv* const values = at_.values + from;
  const int count = tile_->count, dim = dim_;
  Vec sum[Heads][kVecs];
  for (int h = 0; h < Heads; ++h) {
    for (int j = 0; j < kVecs; ++j) sum[h][j] = load(out + h * dim + j * kLanes) * scale_[h];
  }
  for (int n = 0; n < count; ++n) {
    if (is_first) prefetch(next_.values, n);
    const Kv* value = values + tile_->offset[n];
    Vec x[kVecs];
    if constexpr (Pairs == 0) x[0] = load_float(value);
    for (int j = 0; j < Pairs; ++j) {
      const VecPair pair = load_pair(value + j * kPair);
      x[2 * j] = pair.first;
      x[2 * j + 1] = pair.second;
    }
    for (int h = 0; h < Heads; ++h) {
      for (int j = 0; j < kVecs; ++j) sum[h][j] += x[j] * score_[h][n];
    }
  }
  for (int h = 0; h < Heads; ++h) {
    for (int j = 0; j < kVecs; ++j) store(out + h * dim + j * kLanes, sum[h][j]);
  }
}

template <class Elem, class Kv>
void Rows<Elem, Kv>::finish_unit() {
  for (int h = 0; h < num_heads_; ++h) {
    const float* out = out_ + h * dim_;
    const int end = dim_ / kPair * kPair;
    for (int i = 0; i < end; i += kPair) from_pair_order(at_.keys, out + i, unordered_ + i);
    std::copy(out + end, out + dim_, unordered_ + end);
    const Partial part{unordered_, top_[h], weight_[h]};
    merge_part(step_, layer_, row_, head_ + h, part, piece_ >= step_.num_shared);
  }
}

}  // namespace

template <class Elem, class Kv>
void attend_rows(const Step& step, const Layer& layer, HeadRange kv_heads, int piece, int first, int count) {
  for (int i = first; i < first + count; ++i) {
    Rows<Elem, Kv> rows(step, layer, kv_heads, piece, i);
    rows.run_through();
  }
}
template void attend_rows<float, float>(const Step&, const Layer&, HeadRange, int, int, int);
template void attend_rows<float, int8_t>(const Step&, const Layer&, HeadRange, int, int, int);
template void attend_rows<bf16, bf16>(const Step&, const Layer&, HeadRange, int, int, int);
template void attend_rows<bf16, int8_t>(const Step&, const Layer&, HeadRange, int, int, int);

}  // namespace mneme::attention
