"""Models on the Hugging Face Hub: what a repository has, resumable downloads, and the cache."""
