"""Small helpers that every room uses and no user sees."""
