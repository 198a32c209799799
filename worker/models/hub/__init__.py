"""Models on the Hugging Face Hub: what a repository has, downloads that go on where they stopped, and the cache."""
