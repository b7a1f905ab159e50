"""Clean training scripts as people write them; none of them knows of the doctor."""
