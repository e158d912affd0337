"""Reports of a run: tables and charts, as Markdown, LaTeX, CSV and one HTML page."""
