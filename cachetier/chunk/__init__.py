"""What a chunk is: its key, what model it belongs to, its header, its file, and every way in which one can be missing.

Public: `keys`, `fingerprint`, `header`, `file`. The bottom of the cache tier: imports nothing of it; all
import it. Position-decoupled KV as a unit of storage: AttentionStore 3.4, CacheBlend 5.
"""
