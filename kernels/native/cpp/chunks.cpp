// Moving tokens between a layer of a chunk, [K and V, num_kv_heads, num_tokens, token], and the pages of a pool. Bytes: each read
// and written once.
#include <cstdint>
#include <cstring>

namespace mneme::chunks {

// Tokens that lie side by side in both; native/kv.py: runs.
struct Run {
  int64_t page_id, offset, count, first_token;
};

static bool fits(const Run& run, int64_t num_tokens, int64_t num_pages, int64_t page_size) {
  if (run.page_id < 0 || run.page_id >= num_pages || run.count < 1) return false;
  const bool in_page = run.offset >= 0 && run.offset < page_size && run.count <= page_size - run.offset;
  return in_page && run.first_token >= 0 && run.first_token < num_tokens && run.count <= num_tokens - run.first_token;
}

}  // namespace mneme::chunks

using namespace mneme::chunks;

// A pool is [num_kv_heads, num_pages, page_size, token]; a token is token_bytes long.
// Returns the first run that is out of range (and copies nothing then), or -1.
extern "C" int64_t mneme_copy_tokens(char* k_pages, char* v_pages, char* chunk, const Run* runs, int64_t num_runs,
                                     int64_t num_tokens, int64_t num_kv_heads, int64_t num_pages, int64_t page_size,
                                     int64_t token_bytes, int32_t into_pool) {
  for (int64_t i = 0; i < num_runs; ++i)
    if (!fits(runs[i], num_tokens, num_pages, page_size)) return i;
  for (int64_t row = 0; row < 2 * num_kv_heads; ++row) {  // K's heads, then V's: the chunk is walked once, in order
    char* pool = row < num_kv_heads ? k_pages : v_pages;
    pool += row % num_kv_heads * num_pages * page_size * token_bytes;
    char* tokens = chunk + row * num_tokens * token_bytes;
    for (const Run* run = runs; run != runs + num_runs; ++run) {
      char* slots = pool + (run->page_id * page_size + run->offset) * token_bytes;
      char* side_by_side = tokens + run->first_token * token_bytes;
      into_pool ? std::memcpy(slots, side_by_side, run->count * token_bytes)
                : std::memcpy(side_by_side, slots, run->count * token_bytes);
    }
  }
  return -1;
}
