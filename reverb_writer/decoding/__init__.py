"""Decode samples to columns of batches: each chunk is decoded once, and the rows of a batch are copied together. Pure.

    BatchAssembler   samples -> row ranges of chunks -> columns: one `take` per column
       ▼
    SampleDecoder    an item -> its row ranges in decoded chunks
       ▼             one cache per layout of columns in chunks (at most four)
    ItemCache        items by key: row ranges in the rings, if all chunks of the item are decoded
       ▼             one ring per group of columns
    ChunkRing        decoded chunks: rows of one array per column

A full ring does not evict chunks by itself: the assembler must first copy the rows that its batch needs.
"""
