"""KV memory: blocks, the tree of prefixes over them, and what has to be moved."""
