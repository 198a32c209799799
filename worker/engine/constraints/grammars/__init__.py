"""Grammars of constrained outputs, compiled and matched in one process."""
