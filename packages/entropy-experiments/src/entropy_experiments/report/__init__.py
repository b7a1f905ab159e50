"""What people read: findings, the verdict in words, run logs."""
