"""The read path: samples of a table, fetched ahead, as batches for any learner."""
