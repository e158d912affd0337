/* What this was compiled from: see fingerprint.py. */

__attribute__((visibility("default"))) const char *fingerprint(void) { return FINGERPRINT; }
