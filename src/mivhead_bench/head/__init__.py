"""The MIV-head in PyTorch: the paper as a text, the reference of the tests, the path on a GPU.

Read `pooling` (Component 1), `cap` (Component 2) and `logits` (Component 3) beside the paper;
`head` puts them in a row, and `training` fits them to a support set. `mivhead` computes the same in
NumPy and C, with its gradients written out.
"""
