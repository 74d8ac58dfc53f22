"""What config.json says becomes a ModelSpec: `load` for every family, and a file of readers for each. No torch."""
