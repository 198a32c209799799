"""Constraints in processes of their own, whose time and memory end where the kernel ends them."""
