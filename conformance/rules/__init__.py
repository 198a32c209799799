"""The rules of the wire, a module for each part of it."""
