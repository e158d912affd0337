/* What this was compiled from: see `fingerprint` in kernels.py. */

__attribute__((visibility("default"))) const char *fingerprint(void) { return FINGERPRINT; }
