"""The catalogue of patches, one module each."""
