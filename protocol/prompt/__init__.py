"""Turns texts and conversations into token ids: chat templates, their rendering, tokenizer bundles."""
