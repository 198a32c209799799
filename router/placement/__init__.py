"""Choosing a worker: what is known of those of a model, which prefixes they hold, and what each would cost. Pure."""
