"""Getting models before an engine loads them: from the Hub into its cache. Nothing here imports an engine's library."""
