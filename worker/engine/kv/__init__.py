"""KV memory: the block pool, its allocations and prefix cache, and the ops on lanes that follow from them."""
