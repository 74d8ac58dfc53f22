"""Receipts: the same prompts under many settings that keep bits, what must be equal, and what shows that it ran."""
