"""Accuracy estimate, suspicious shots, attention, pictures."""
