"""Is a known sample in the batch? Spans of a layer's gradient answer it exactly, a likelihood behind noise; and what noise allows."""
