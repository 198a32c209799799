"""The process side of every server: signals, reloading of settings, freed memory."""
