"""The benchmark's image sets: a catalogue, preparation of downloads, Meta-Dataset's records."""
