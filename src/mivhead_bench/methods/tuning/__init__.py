"""Methods that tune a copy of the backbone: images and a torch module in, adapters out."""
