"""Finds the files of a model and reads from them how the model is meant to be used."""
