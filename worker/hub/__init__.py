"""Repositories on the Hugging Face Hub and the local cache of them."""
