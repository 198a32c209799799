"""Finds the files of a model and reads what they say about how the model wants to be used."""
