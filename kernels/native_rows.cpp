// Few query heads over keys: every head's dot product with every key, head_dim in lanes, straight from the pages and each
// byte once. A decode step's private pages run at memory's rate here.
#include "native_attention.h"

#include <algorithm>
#include <cmath>

namespace mneme::attention {
namespace {

constexpr int kMostHeads = 4;                                       // that go over a tile together
constexpr int kMostChunk = kLanes == 16 ? 4 : 2;                    // vectors of values that are summed together
constexpr int kKeysAtOnce = kLanes == 16 ? 4 : 2;                   // dot products of so many keys run side by side
constexpr int kPrefetchKeys = 16;                                   // how far ahead of its use a row of a page is asked for
constexpr int kCacheLine = 64;

// One query row, one KV head, up to kMostHeads of its query heads.
template <class Elem>
class Rows {
 public:
  Rows(const Step& step, const Layer& layer, int kv_head, int piece, int first, int head, int num_heads);
  void run_through();
  void finish();

 private:
  template <int Heads>
  void scores();
  template <int Heads>
  void add_tile();
  template <int Heads, int Chunk>
  void add_values(int from);
  void softmax(int head);
  const Elem* row_of(const void* pool, int n) const {
    return static_cast<const Elem*>(pool) + (kv_head_ * layer_.num_slots + tile_.slot[n]) * step_.head_dim;
  }

  const Step& step_;
  const Layer& layer_;
  const int64_t kv_head_;
  const int piece_, first_, row_, head_, num_heads_, dim_;
  int position_ = 0;
  KeyTile tile_;
  float *query_, *out_;  // [num_heads, dim]
  alignas(64) float score_[kMostHeads][kTileKeys];
  float top_[kMostHeads], weight_[kMostHeads], scale_[kMostHeads];
};

template <class Elem>
Rows<Elem>::Rows(const Step& step, const Layer& layer, int kv_head, int piece, int first, int head, int num_heads)
    : step_(step),
      layer_(layer),
      kv_head_(kv_head),
      piece_(piece),
      first_(first),
      row_(step.row[step.row_begin[piece] + first]),
      head_(head),
      num_heads_(num_heads),
      dim_(step.head_dim) {
  query_ = thread_scratch(2 * kMostHeads * static_cast<size_t>(dim_));
  out_ = query_ + kMostHeads * dim_;
  std::fill_n(out_, num_heads * dim_, 0.0f);
  std::fill_n(top_, kMostHeads, kUnseen);
  std::fill_n(weight_, kMostHeads, 0.0f);
}

template <class Elem>
void Rows<Elem>::run_through() {
  for (int run = step_.run_begin[piece_]; run < step_.run_begin[piece_ + 1]; ++run) {
    const RunRows rows = run_rows(step_, piece_, run, first_, 1);
    position_ = rows.lowest;
    KeyCursor cursor(step_, rows);
    if (!cursor.next(tile_)) continue;
    for (int h = 0; h < num_heads_; ++h) {
      const int64_t at = row_ * layer_.q_stride + (head_ + h) * static_cast<int64_t>(dim_);
      rotate_query(step_, static_cast<const Elem*>(layer_.q) + at, position_, query_ + h * dim_);
    }
    do {
      switch (num_heads_) {
        case 1: add_tile<1>(); break;
        case 2: add_tile<2>(); break;
        case 3: add_tile<3>(); break;
        default: add_tile<4>();
      }
    } while (cursor.next(tile_));
  }
}

template <class Elem>
template <int Heads>
void Rows<Elem>::add_tile() {
  scores<Heads>();
  for (int h = 0; h < Heads; ++h) softmax(h);
  int i = 0;
  for (; i + kMostChunk * kLanes <= dim_; i += kMostChunk * kLanes) add_values<Heads, kMostChunk>(i);
  for (; i < dim_; i += kLanes) add_values<Heads, 1>(i);
}

template <class Elem>
template <int Heads>
void Rows<Elem>::scores() {
  for (int begin = 0; begin < tile_.count; begin += kLanes) {
    Vec product[Heads][kLanes];
    for (int n = 0; n < kLanes; n += kKeysAtOnce) {
      const Elem* key[kKeysAtOnce];
      for (int k = 0; k < kKeysAtOnce; ++k) key[k] = row_of(layer_.k, std::min(begin + n + k, tile_.count - 1));
      Vec sum[Heads][kKeysAtOnce] = {};
      for (int i = 0; i < dim_; i += kLanes) {
        Vec query[Heads];
        for (int h = 0; h < Heads; ++h) query[h] = load(query_ + h * dim_ + i);
        for (int k = 0; k < kKeysAtOnce; ++k) {
          const Vec x = load_float(key[k] + i);
          for (int h = 0; h < Heads; ++h) sum[h][k] += query[h] * x;
        }
      }
      for (int h = 0; h < Heads; ++h) {
        for (int k = 0; k < kKeysAtOnce; ++k) product[h][n + k] = sum[h][k];
      }
    }
    for (int h = 0; h < Heads; ++h) store(score_[h] + begin, lane_sums(product[h]));
  }
}

// Scores of one head become probabilities relative to the new maximum.
template <class Elem>
void Rows<Elem>::softmax(int h) {
  float* score = score_[h];
  const Vec slope = splat(step_.alibi_slopes ? step_.alibi_slopes[head_ + h] : 0.0f);
  Vec top = splat(top_[h]), sum = {};
  const bool is_plain = !step_.alibi_slopes && !(step_.soft_cap > 0);
  const int padded = round_up(tile_.count, kLanes);
  for (int n = 0; n < padded && !is_plain; n += kLanes) {
    store(score + n, adjusted(step_, load(score + n), slope, load(tile_.position + n) - splat(position_)));
  }
  for (int n = tile_.count; n < padded; ++n) score[n] = -INFINITY;
  for (int n = 0; n < padded; n += kLanes) top = larger(top, load(score + n));
  const float old = top_[h], now = horizontal_max(top);
  for (int n = 0; n < padded; n += kLanes) {
    const Vec probability = exp2(load(score + n) - splat(now));
    sum += probability;
    store(score + n, probability);
  }
  scale_[h] = std::exp2(old - now);
  top_[h] = now;
  weight_[h] = weight_[h] * scale_[h] + horizontal_sum(sum);
}

template <class Elem>
template <int Heads, int Chunk>
void Rows<Elem>::add_values(int from) {
  Vec sum[Heads][Chunk];
  for (int h = 0; h < Heads; ++h) {
    for (int j = 0; j < Chunk; ++j) sum[h][j] = load(out_ + h * dim_ + from + j * kLanes) * scale_[h];
  }
  for (int n = 0; n < tile_.count; ++n) {
    const Elem* values = row_of(layer_.v, n) + from;
    Vec x[Chunk];
    for (int j = 0; j < Chunk; ++j) x[j] = load_float(values + j * kLanes);
    for (int h = 0; h < Heads; ++h) {
      for (int j = 0; j < Chunk; ++j) sum[h][j] += x[j] * score_[h][n];
    }
  }
  for (int h = 0; h < Heads; ++h) {
    for (int j = 0; j < Chunk; ++j) store(out_ + h * dim_ + from + j * kLanes, sum[h][j]);
  }
}

template <class Elem>
void Rows<Elem>::finish() {
  for (int h = 0; h < num_heads_; ++h) {
    const Partial part{out_ + h * dim_, top_[h], weight_[h]};
    merge_part(step_, layer_, row_, head_ + h, part, piece_ >= step_.num_shared);
  }
}

}  // namespace

template <class Elem>
void attend_rows(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count) {
  const int num_groups = step.num_q_heads / step.num_kv_heads;
  for (int i = first; i < first + count; ++i) {
    for (int head = 0; head < num_groups; head += kMostHeads) {
      const int num_heads = std::min(kMostHeads, num_groups - head);
      Rows<Elem> rows(step, layer, kv_head, piece, i, kv_head * num_groups + head, num_heads);
      rows.run_through();
      rows.finish();
    }
  }
}
template void attend_rows<float>(const Step&, const Layer&, int, int, int, int);
template void attend_rows<bf16>(const Step&, const Layer&, int, int, int, int);

}  // namespace mneme::attention
