"""The simulated engine: the real scheduler and block pool, with a timing model in place of a device."""
