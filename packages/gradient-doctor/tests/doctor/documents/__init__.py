"""The faults of documents 000, 001 and 003, one small script each."""
