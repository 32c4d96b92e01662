// What one call of `attend` reads, and the tiles of keys that its kernels share. See kernels/work.py for the
// arrays and `kernels/reference.py` for the rule that decides what a row sees.
#pragma once

#include "lanes.h"

namespace mneme::attention {

// A step's work and the options of a layer; laid out like native/backend.py: _Step.
struct Step {
  int32_t num_shared, num_pieces, num_rows, num_loose_rows;
  int32_t num_q_heads, num_kv_heads, head_dim, page_size;
  int32_t window;  // positions a row sees; 2**30 where there is no window
  int32_t dtype, rotary_half, num_positions;
  int32_t kv_dtype;   // of keys and values: `dtype`, or int8
  int32_t kv_stride;  // elements from one key of a head to the next: head_dim, and behind int8 the bytes of a scale
  float score_scale;  // of q . k, in units of log 2; with a soft cap: in units of the cap
  float soft_cap;     // in units of log 2; 0: none
  const int32_t *row_begin, *row, *run_begin, *page_begin, *page_end, *page_id;
  const int32_t *delta_begin, *delta, *mask_number, *mask_begin, *mask_stride;
  const int64_t* mask;
  const int32_t* position;       // [T]
  const int32_t* slot_position;  // [num_slots]
  const int32_t* loose_row;      // [num_loose_rows] rows that are in no private piece
  const float* rope;             // [num_positions, 2, rotary_half] cos, sin; null: no rotation
  const int32_t *page_first, *page_last;  // [num_pages] the least and the greatest slot position of a page
};

// One layer's tensors.
struct Layer {
  const void* q;  // [T, num_q_heads, head_dim], rows `q_stride` elements apart
  int64_t q_stride;
  const void *k, *v;  // [num_kv_heads, num_slots, kv_stride]
  int64_t num_slots;
  void* out;     // [T, num_q_heads, head_dim]
  float* lse;    // [T, num_q_heads] natural logarithm
  float* total;  // float32 [T, num_q_heads, head_dim], if there are shared pieces
};

constexpr int kTileKeys = 64;
constexpr int kCacheLine = 64;
constexpr float kUnseen = -1e30f;  // the running maximum of a row that has seen nothing; finite, so that no NaN arises

// What a row of keys or values is to be multiplied with: of int8, the float32 behind its numbers.
template <class Kv>
inline float row_scale(const Kv*, int) {
  return 1;
}
template <>
inline float row_scale(const int8_t* row, int head_dim) {
  float scale;
  std::memcpy(&scale, row + head_dim, sizeof(scale));
  return scale;
}

// Keys that some row of a block may see; those that not every row sees are marked.
struct KeyTile {
  int count;
  bool is_mixed;                 // some key is partial
  int32_t slot[kTileKeys];
  int64_t offset[kTileKeys];     // of the key in a KV head's pool, in elements
  int32_t position[kTileKeys];   // at which the key was rotated
  int32_t page[kTileKeys];       // index into the run's pages
  bool is_partial[kTileKeys];
};

// The rows of a block within one run.
struct RunRows {
  int run, first, count;      // rows [first, first + count) of the piece
  int lowest, highest;        // of their effective positions, `position - delta`
};

// Goes through a run's pages and gives the keys that a block's rows see, tile by tile.
class KeyCursor {
 public:
  KeyCursor(const Step& step, const RunRows& rows);
  bool next(KeyTile& tile);  // false where there are no more keys; the tile is empty then

 private:
  struct Seen {
    uint64_t by_any, by_all;
  };
  Seen seen(int page) const;
  Seen masks(int page) const;

  void add(KeyTile& tile, int offset, bool is_partial) const;
  void add_page(KeyTile& tile) const;

  const Step& step_;
  const RunRows& rows_;
  int page_, page_end_;
  uint64_t left_by_any_ = 0, by_all_ = 0;  // of the page before `page_`
};

// Whether a mask shows row i of a run's piece the offset of a page.
inline bool is_shown(const Step& s, int run, int row, int page, int offset) {
  const int number = s.mask_stride[run] ? s.mask_number[s.delta_begin[run] + row] : 0;
  const int64_t bits = s.mask[s.mask_begin[run] + static_cast<int64_t>(number) * s.mask_stride[run] + page];
  return bits >> offset & 1;
}

// The position of row i of the piece in the frame in which the run's keys were rotated.
inline int effective_position(const Step& s, int piece, int run, int i) {
  return s.position[s.row[s.row_begin[piece] + i]] - s.delta[s.delta_begin[run] + i];
}

RunRows run_rows(const Step& step, int piece, int run, int first, int count);

// Rotates one head to an effective position and scales it; positions that no table holds (a row that sees nothing) are
// clamped.
template <class Elem>
void rotate_query(const Step& step, const Elem* q, int position, float* out);

// One (row, head)'s attention over a piece, unnormalised: out = sum of 2**(score - top) * value.
struct Partial {
  const float* out;
  float top, weight;  // weight: sum of 2**(score - top); 0 if nothing was seen
};

// Merges a part into a (row, head)'s total; the last part of a row goes to `out`.
void merge_part(const Step& step, const Layer& layer, int row, int head, const Partial& part, bool is_last);

struct HeadRange {
  int begin, end;
};

// Scratch of this thread, grown as needed; 64-byte aligned.
float* thread_scratch(size_t num_floats);

// Rows [first, first + count) of a piece, one KV head. Many rows: scores are products of tiles, with rows in lanes.
// Elem is what queries are, Kv what keys and values are.
template <class Elem, class Kv>
void attend_tiles(const Step& step, const Layer& layer, int kv_head, int piece, int first, int count);

// The same for few rows and several KV heads: dot products straight from the pages; head_dim is a multiple of kLanes.
template <class Elem, class Kv>
void attend_rows(const Step& step, const Layer& layer, HeadRange kv_heads, int piece, int first, int count);

}  // namespace mneme::attention
