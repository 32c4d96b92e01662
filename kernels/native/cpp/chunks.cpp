// Moving tokens between a layer of chunks, [chunk, K and V, num_kv_heads, num_tokens, token], and the pages of a pool.
// Bytes: each read and written once.
#include <cstdint>
#include <cstring>

namespace mneme::chunks {

// Tokens that lie side by side in both; native/kv.py: runs.
struct Run {
  int64_t page_id, offset, count, first_token;
};

static bool fits(const Run& run, int64_t num_chunks, int64_t num_tokens, int64_t num_pages, int64_t page_size) {
  if (run.page_id < 0 || run.page_id >= num_pages || run.count < 1) return false;
  if (run.offset < 0 || run.offset >= page_size || run.count > page_size - run.offset) return false;
  const bool in_chunk = run.first_token >= 0 && run.first_token < num_chunks * num_tokens;
  return in_chunk && run.count <= num_tokens - run.first_token % num_tokens;
}

}  // namespace mneme::chunks

using namespace mneme::chunks;

// A pool is [num_kv_heads, num_pages, page_size, token]; a token is token_bytes long.
// Returns the first run that is out of range (and copies nothing then), or -1.
extern "C" int64_t mneme_copy_tokens(char* k_pages, char* v_pages, char* chunks, const Run* runs, int64_t num_runs,
                                     int64_t num_chunks, int64_t num_tokens, int64_t num_kv_heads, int64_t num_pages,
                                     int64_t page_size, int64_t token_bytes, int32_t into_pool) {
  for (int64_t i = 0; i < num_runs; ++i)
    if (!fits(runs[i], num_chunks, num_tokens, num_pages, page_size)) return i;
  const Run* const end = runs + num_runs;
  for (const Run *first = runs, *next; first != end; first = next) {  // the runs of a chunk, which is walked in order
    const int64_t index = first->first_token / num_tokens;
    for (next = first; next != end && next->first_token / num_tokens == index; ++next) {
    }
    for (int64_t row = 0; row < 2 * num_kv_heads; ++row) {  // K's heads, then V's
      char* pool = row < num_kv_heads ? k_pages : v_pages;
      pool += row % num_kv_heads * num_pages * page_size * token_bytes;
      char* tokens = chunks + (index * 2 * num_kv_heads + row) * num_tokens * token_bytes;
      for (const Run* run = first; run != next; ++run) {
        char* slots = pool + (run->page_id * page_size + run->offset) * token_bytes;
        char* side_by_side = tokens + run->first_token % num_tokens * token_bytes;
        into_pool ? std::memcpy(slots, side_by_side, run->count * token_bytes)
                  : std::memcpy(side_by_side, slots, run->count * token_bytes);
      }
    }
  }
  return -1;
}
