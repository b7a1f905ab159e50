"""An influence study: its batches, its stages on disk, and the files it leaves."""
