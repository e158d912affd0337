"""Images: safe decoding; folders, zips and tables as an `ImageSet`; augmentation."""
