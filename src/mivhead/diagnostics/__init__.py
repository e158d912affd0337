"""How good a fitted model is, and why it decides as it does.

- `evaluation`: accuracy on labelled images that the model has not seen.
- `estimate`: accuracy estimated by cross-validation on the shots, and shots that look mislabelled.
- `attention`: which patches of an image and which shots the head attends to.
- `tsne`: the vectors that the head compares, projected onto a plane.
- `pictures`: what the drawings share, and the confusion matrix.
"""
