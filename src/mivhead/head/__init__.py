"""The MIV-head, to be read along with the paper: recipe, pooling, cap, logits, head, training."""
