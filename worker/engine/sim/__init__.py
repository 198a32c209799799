"""The simulated engine: the real scheduler and real blocks, with a timing model in place of a device."""
