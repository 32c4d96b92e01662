"""One node's cache of chunks, memory over disk, without Ray: what is here, who goes next, what is read and written.

Public: `cache.NodeCache`, `sources.ProcessChunkStore`, `disk.DiskTier`, `node_admin.NodeAdmin`, `offline`. Imports
`chunk` and `policy`; `distributed` imports it. AttentionStore 3.1 and 3.3: the hierarchy and its
eviction.
"""
