// Attention over a step's work list: pieces of shared segments first, then every sequence's own pages; what a row got
// from several pieces is merged by log-sum-exp (ChunkAttention 3.2, RelayAttention 3.3).
// Bytes: K and V of the pages that a block of rows sees, once per block; q and out once. Flops: 4 * head_dim per query
// head and visible key.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace mneme::attention {

constexpr float kLn2 = 0.69314718055994531f;
// Query heads of a block of rows: what shares a packed tile of values (128 is 10% slower in a prefill) and, with several
// threads, what one of them takes.
constexpr int kBlockHeads = 256;
// Up to so many query heads of one row, or fewer than that of several rows (which would each read the keys), dot products
// straight from the pages beat tiles: of 8 heads of a row they take half the time, of 16 as much.
constexpr int kFewHeads = 8;

float* thread_scratch(size_t num_floats) {
  struct Buffer {
    float* floats = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(floats); }
  };
  thread_local Buffer buffer;
  if (buffer.size < num_floats) {
    std::free(buffer.floats);
    buffer.size = (num_floats + 15) / 16 * 16;
    buffer.floats = static_cast<float*>(std::aligned_alloc(64, buffer.size * sizeof(float)));
  }
  return buffer.floats;
}

template <class Elem>
void rotate_query(const Step& s, const Elem* q, int position, float* __restrict out) {
  const int half = s.rope ? s.rotary_half : 0, dim = s.head_dim;
  const int last = s.num_positions > 0 ? s.num_positions - 1 : 0;
  const float scale = s.score_scale;
  const float* cos = s.rope + static_cast<int64_t>(std::clamp(position, 0, last)) * 2 * half;
  const float* sin = cos + half;
  const Elem* second = q + half;
  for (int i = 0; i < half; ++i) {
    out[i] = (to_float(q[i]) * cos[i] - to_float(second[i]) * sin[i]) * scale;
    out[half + i] = (to_float(second[i]) * cos[i] + to_float(q[i]) * sin[i]) * scale;
  }
  for (int i = 2 * half; i < dim; ++i) out[i] = to_float(q[i]) * scale;
}
template void rotate_query(const Step&, const float*, int, float*);
template void rotate_query(const Step&, const bf16*, int, float*);

// One head of one row.
static void write_out(const Step& s, const Layer& layer, int64_t index, const float* x, float weight) {
  const int dim = s.head_dim;
  if (s.dtype == kFloat32) {
    float* __restrict out = static_cast<float*>(layer.out) + index * dim;
    for (int i = 0; i < dim; ++i) out[i] = x[i] * weight;
    return;
  }
  bf16* out = static_cast<bf16*>(layer.out) + index * dim;
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(out + i, load(x + i) * weight);
  for (; i < dim; ++i) out[i] = to_bf16(x[i] * weight);
}

// The lse tensor holds a total's logarithm in units of log 2 until the row's last part.
void merge_part(const Step& s, const Layer& layer, int row, int head, const Partial& part, bool is_last) {
  const int64_t index = static_cast<int64_t>(row) * s.num_q_heads + head;
  float* total = layer.total + index * s.head_dim;
  const float old = layer.lse[index];
  const bool is_seen = part.weight != 0, was_seen = old != -INFINITY;
  const float lse = is_seen ? part.top + std::log2(part.weight) : -INFINITY;
  if (!was_seen || !is_seen) {  // the part alone, or the total so far
    layer.lse[index] = is_last ? (is_seen ? lse : old) * kLn2 : (is_seen ? lse : old);
    const float* x = is_seen ? part.out : total;
    const float weight = is_seen ? 1 / part.weight : was_seen ? 1.0f : 0.0f;
    if (is_last && weight == 0) {
      write_out(s, layer, index, part.out, 0);  // nobody showed this row a key: part.out holds zeros
    } else if (is_last) {
      write_out(s, layer, index, x, weight);
    } else if (is_seen) {
      for (int i = 0; i < s.head_dim; ++i) total[i] = x[i] * weight;
    }
    return;
  }
  const float top = lse > old ? lse : old;
  const float mine = std::exp2(lse - top), before = std::exp2(old - top), sum = mine + before;
  const float part_weight = mine / sum / part.weight, total_weight = before / sum;
  for (int i = 0; i < s.head_dim; ++i) total[i] = total[i] * total_weight + part.out[i] * part_weight;
  layer.lse[index] = is_last ? (top + std::log2(sum)) * kLn2 : top + std::log2(sum);
  if (is_last) write_out(s, layer, index, total, 1);
}

// A row that is in no private piece has been through its last part.
static void finish_loose_row(const Step& s, const Layer& layer, int row) {
  for (int head = 0; head < s.num_q_heads; ++head) {
    const int64_t index = static_cast<int64_t>(row) * s.num_q_heads + head;
    if (layer.lse[index] == -INFINITY) {
      const size_t size = s.dtype == kFloat32 ? 4 : 2;
      std::memset(static_cast<char*>(layer.out) + index * s.head_dim * size, 0, s.head_dim * size);
    } else {
      layer.lse[index] *= kLn2;
      write_out(s, layer, index, layer.total + index * s.head_dim, 1);
    }
  }
}

template <class Body>
static void parallel_for(int count, int num_threads, const Body& body) {
  if (num_threads <= 1 || count <= 1) {
    for (int i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
  for (int i = 0; i < count; ++i) body(i);
}

struct Block {
  int piece, first, count;  // rows [first, first + count) of the piece
};

template <class Elem, class Kv>
static void attend_block(const Step& s, const Layer& layer, HeadRange kv_heads, const Block& block) {
  const int num_groups = s.num_q_heads / s.num_kv_heads;
  const bool is_few = block.count == 1 ? num_groups <= kFewHeads : block.count * num_groups < kFewHeads;
  if (is_few && s.head_dim % kLanes == 0) {
    return attend_rows<Elem, Kv>(s, layer, kv_heads, block.piece, block.first, block.count);
  }
  for (int head = kv_heads.begin; head < kv_heads.end; ++head) {
    attend_tiles<Elem, Kv>(s, layer, head, block.piece, block.first, block.count);
  }
}

// Blocks side by side; the KV heads of a block too, where there are few blocks for so many threads.
template <class Elem, class Kv>
static void attend_blocks(const Step& s, const Layer& layer, const std::vector<Block>& blocks, int num_threads) {
  const int num_blocks = static_cast<int>(blocks.size());
  const int parts = num_threads > 1 && num_blocks < 4 * num_threads ? s.num_kv_heads : 1;
  parallel_for(num_blocks * parts, num_threads, [&](int task) {
    const int head = task % parts;
    const HeadRange kv_heads = parts == 1 ? HeadRange{0, s.num_kv_heads} : HeadRange{head, head + 1};
    attend_block<Elem, Kv>(s, layer, kv_heads, blocks[task / parts]);
  });
}

static void add_blocks(const Step& s, int piece, int block_rows, std::vector<Block>& blocks) {
  const int num_rows = s.row_begin[piece + 1] - s.row_begin[piece];
  for (int first = 0; first < num_rows; first += block_rows) {
    blocks.push_back({piece, first, std::min(block_rows, num_rows - first)});
  }
}

// Blocks of a piece run side by side unless a row stands in it twice: then one thread takes all blocks of a head.
template <class Elem, class Kv>
static void attend_shared(const Step& s, const Layer& layer, int piece, int block_rows, int num_threads) {
  const int32_t *row = s.row + s.row_begin[piece], *end = s.row + s.row_begin[piece + 1];
  std::vector<Block> blocks;
  add_blocks(s, piece, block_rows, blocks);
  const bool is_unique = std::adjacent_find(row, end, [](int a, int b) { return a >= b; }) == end;
  if (is_unique) return attend_blocks<Elem, Kv>(s, layer, blocks, num_threads);
  parallel_for(s.num_kv_heads, num_threads, [&](int head) {
    for (const Block& block : blocks) attend_block<Elem, Kv>(s, layer, {head, head + 1}, block);
  });
}

// Each row is in one private piece at most, so all blocks run side by side.
template <class Elem, class Kv>
static void attend_private(const Step& s, const Layer& layer, int block_rows, int num_threads) {
  std::vector<Block> blocks;
  for (int piece = s.num_shared; piece < s.num_pieces; ++piece) add_blocks(s, piece, block_rows, blocks);
  attend_blocks<Elem, Kv>(s, layer, blocks, num_threads);
}

template <class Elem, class Kv>
static void attend_all(const Step& s, const Layer& layer, int num_threads) {
  const int num_groups = s.num_q_heads / s.num_kv_heads;
  const int block_rows = std::max(1, kBlockHeads / num_groups);
  std::fill_n(layer.lse, static_cast<int64_t>(s.num_rows) * s.num_q_heads, -INFINITY);
  for (int piece = 0; piece < s.num_shared; ++piece) {
    attend_shared<Elem, Kv>(s, layer, piece, block_rows, num_threads);
  }
  attend_private<Elem, Kv>(s, layer, block_rows, num_threads);
  for (int i = 0; i < s.num_loose_rows; ++i) finish_loose_row(s, layer, s.loose_row[i]);
}

}  // namespace mneme::attention

using namespace mneme;
using namespace mneme::attention;

extern "C" void mneme_attend(const Step* step, const void* q, int64_t q_stride, const void* k, const void* v,
                             int64_t num_slots, void* out, float* lse, float* total, int32_t num_threads) {
  const Layer layer{q, q_stride, k, v, num_slots, out, lse, total};
  const bool is_float = step->dtype == kFloat32;
  if (step->kv_dtype == kInt8) {
    is_float ? attend_all<float, int8_t>(*step, layer, num_threads) : attend_all<bf16, int8_t>(*step, layer, num_threads);
  } else {
    is_float ? attend_all<float, float>(*step, layer, num_threads) : attend_all<bf16, bf16>(*step, layer, num_threads);
  }
}
