"""A request on its way: taken in, tokenized, waiting for its turn, dispatched, answered."""
