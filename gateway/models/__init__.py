"""The models that a gateway lists."""
