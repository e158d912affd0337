"""Pictures for people, drawn with matplotlib, which is imported only when one is drawn."""
