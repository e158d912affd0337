"""Front doors over HTTP."""
