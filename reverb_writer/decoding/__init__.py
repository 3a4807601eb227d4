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

Data goes down only. A ring that is full does not evict chunks by itself: `ChunkRing.put` returns False, because the
assembler must first copy the rows that its batch needs, and forget the items of the chunks that are evicted.
"""
