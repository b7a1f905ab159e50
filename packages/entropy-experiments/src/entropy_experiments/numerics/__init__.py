"""Pure tensor mathematics: no files, no model libraries."""
