// Which keys a block of rows reads: the rule of visibility (`kernels/reference.py`), page by page.
#include "attention.h"

namespace mneme::attention {

RunRows run_rows(const Step& s, int piece, int run, int first, int count) {
  int lowest = INT32_MAX, highest = INT32_MIN;
  for (int i = first; i < first + count; ++i) {
    const int position = effective_position(s, piece, run, i);
    lowest = position < lowest ? position : lowest;
    highest = position > highest ? position : highest;
  }
  return {run, first, count, lowest, highest};
}

KeyCursor::KeyCursor(const Step& step, const RunRows& rows)
    : step_(step), rows_(rows), page_(step.page_begin[rows.run]), page_end_(step.page_end[rows.run]) {}

// The masks of a page, of all rows of the block.
KeyCursor::Seen KeyCursor::masks(int page) const {
  const int64_t* mask = step_.mask + step_.mask_begin[rows_.run] + page - step_.page_begin[rows_.run];
  const int stride = step_.mask_stride[rows_.run];
  if (stride == 0) return {static_cast<uint64_t>(*mask), static_cast<uint64_t>(*mask)};
  Seen seen{0, ~uint64_t{0}};
  const int32_t* number = step_.mask_number + step_.delta_begin[rows_.run];
  for (int i = rows_.first; i < rows_.first + rows_.count; ++i) {
    const uint64_t bits = static_cast<uint64_t>(mask[static_cast<int64_t>(number[i]) * stride]);
    seen.by_any |= bits;
    seen.by_all &= bits;
  }
  return seen;
}

// `by_any` may hold a key that a window hides from every row: such a key is partial.
KeyCursor::Seen KeyCursor::seen(int page) const {
  const Step& s = step_;
  const int first = s.page_first[s.page_id[page]], last = s.page_last[s.page_id[page]];
  if (first > rows_.highest) return {0, 0};
  Seen seen = masks(page);
  const bool in_window = first > rows_.highest - s.window;
  if (last <= rows_.lowest && in_window) return seen;
  const int32_t* position = s.slot_position + static_cast<int64_t>(s.page_id[page]) * s.page_size;
  uint64_t some = 0, all = 0;
  for (int offset = 0; offset < s.page_size; ++offset) {
    const int at = position[offset];
    some |= static_cast<uint64_t>(at <= rows_.highest && at > rows_.lowest - s.window) << offset;
    all |= static_cast<uint64_t>(at <= rows_.lowest && at > rows_.highest - s.window) << offset;
  }
  return {seen.by_any & some, seen.by_all & all};
}

// One key of the page before `page_`.
void KeyCursor::add(KeyTile& tile, int offset, bool is_partial) const {
  const int n = tile.count++;
  tile.slot[n] = step_.page_id[page_ - 1] * step_.page_size + offset;
  tile.position[n] = step_.slot_position[tile.slot[n]];
  tile.page[n] = page_ - 1 - step_.page_begin[rows_.run];
  tile.is_partial[n] = is_partial;
  tile.is_mixed |= is_partial;
}

// All keys of that page, which every row sees.
void KeyCursor::add_page(KeyTile& tile) const {
  const int size = step_.page_size, slot = step_.page_id[page_ - 1] * size;
  const int page = page_ - 1 - step_.page_begin[rows_.run], count = tile.count;
  const int32_t* position = step_.slot_position + slot;
  int32_t *to_slot = tile.slot + count, *to_position = tile.position + count, *to_page = tile.page + count;
  for (int i = 0; i < size; ++i) {
    to_slot[i] = slot + i;
    to_position[i] = position[i];
    to_page[i] = page;
  }
  std::memset(tile.is_partial + tile.count, 0, size);
  tile.count += size;
}

bool KeyCursor::next(KeyTile& tile) {
  tile.count = 0;
  tile.is_mixed = false;
  const uint64_t whole_page = ~uint64_t{0} >> (64 - step_.page_size);
  while (tile.count < kTileKeys) {
    if (left_by_any_ == 0) {
      if (page_ == page_end_) break;
      const Seen found = seen(page_++);
      left_by_any_ = found.by_any;
      by_all_ = found.by_all;
    } else if ((left_by_any_ & by_all_) == whole_page && tile.count + step_.page_size <= kTileKeys) {
      add_page(tile);
      left_by_any_ = 0;
    } else {
      const int offset = __builtin_ctzll(left_by_any_);
      left_by_any_ &= left_by_any_ - 1;
      add(tile, offset, !(by_all_ >> offset & 1));
    }
  }
  for (int n = 0; n < tile.count; ++n) tile.offset[n] = static_cast<int64_t>(tile.slot[n]) * step_.kv_stride;
  return tile.count > 0;
}

}  // namespace mneme::attention
