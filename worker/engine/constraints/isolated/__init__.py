"""Constraints in separate processes, whose time and memory are limited by the kernel."""
