"""Encoded samples to columns of batches: each chunk is decoded once, and the rows of a batch are copied together. Pure.

    samples: items and encoded chunks
       │  BatchAssembler.add
       ▼
    BatchAssembler ── parse_trajectory ──►  which rows of which chunks the item consists of
       │
       │  one ItemCache for each way in which items lay out columns in chunks (at most four)
       ▼
    ItemCache         items by their key: row ranges in the rings, if all their chunks are decoded
       │
       │  one Partition for each group of columns
       ▼
    ChunkRing         decoded chunks: rows of one array for each column
       ▲  put(chunk)
       │
    EncodedChunks     the sample's chunks, checked

    BatchAssembler.take copies the rows of all samples out of the rings: one `take`, and one Column, for each column.

Data goes down only: no object knows the one that owns it. A ring that is full does not evict chunks by itself.
`ChunkRing.put` returns False. Then the BatchAssembler copies the rows that its batch needs, calls
`ChunkRing.evict_for`, has the ItemCache forget the items of the evicted chunks, and puts the chunk again. If a chunk
is larger than its ring, or the chunks of one item evict each other, `ItemCache.reset_for` empties the rings, and
enlarges them for this item if need be.
"""
