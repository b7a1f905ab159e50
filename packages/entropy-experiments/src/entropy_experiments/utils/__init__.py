"""Module paths of document 004; each file says where its contents live now."""
