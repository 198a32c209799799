"""Benchmarks of a whole system, compared with the programs and the server of llama.cpp."""
