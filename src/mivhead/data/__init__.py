"""Images on their way in: safe decoding, folders and zips, augmentation, prefetching."""
