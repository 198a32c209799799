"""Decides what each step computes, and for which sequences."""
