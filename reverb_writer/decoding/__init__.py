"""Encoded samples to columns of batches: each chunk is decoded once, and the rows of a batch are copied together. Pure.

    BatchAssembler   samples -> which rows of which chunks -> columns: one `take` for each
       ▼             one for each way in which items lay out columns in chunks (at most four)
    ItemCache        items by their key: row ranges in the rings, if all their chunks are decoded
       ▼             one for each group of columns
    ChunkRing        decoded chunks: rows of one array for each column

A ring that is full does not evict chunks by itself: the assembler must first copy the rows that its batch needs.
"""
