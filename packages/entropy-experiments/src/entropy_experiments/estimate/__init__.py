"""How an update changes entropy: predicted, measured, and checked by fresh samples."""
