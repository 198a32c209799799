"""The rules of the wire contract, one module for each part of it."""
