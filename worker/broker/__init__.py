"""A worker on the bus: the subjects it serves, its card, event log and snapshots, and the fence before every write."""
