"""How good a fitted model is, and why it decides as it does.

- `evaluation`: accuracy on labelled images that the model has not seen.
- `cross_validation`: accuracy estimated on the shots, and shots that look mislabelled.
- `learning_curve`: from out-of-fold predictions to the accuracy to expect.
- `explanation`: the reasons for a prediction, as an object; `reasons_picture` draws it.
- `suggestion`: which images to label next.
- `pages`: pages of results and of suspicious shots, each one self-contained HTML file.
- `attention`: which patches of an image and which shots the head attends to.
- `tsne`: the vectors that the head compares, projected onto a plane.
- `plots`: drawings of how a model classifies one image.
- `pictures`: the confusion matrix, and helpers for all drawings.
- `demo_picture`: the picture that `miv demo` draws.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.diagnostics.attention import BlockAttention as BlockAttention
    from mivhead.diagnostics.attention import draw_attention as draw_attention
    from mivhead.diagnostics.attention import explain as explain
    from mivhead.diagnostics.cross_validation import CrossValidation as CrossValidation
    from mivhead.diagnostics.cross_validation import cross_validate as cross_validate
    from mivhead.diagnostics.evaluation import Evaluation as Evaluation
    from mivhead.diagnostics.evaluation import evaluate as evaluate
    from mivhead.diagnostics.explanation import Explanation as Explanation
    from mivhead.diagnostics.explanation import explain_images as explain_images
    from mivhead.diagnostics.pictures import draw_confusion as draw_confusion
    from mivhead.diagnostics.suggestion import Suggestion as Suggestion
    from mivhead.diagnostics.suggestion import suggest as suggest
    from mivhead.diagnostics.tsne import Embeddings as Embeddings
    from mivhead.diagnostics.tsne import centroid_embeddings as centroid_embeddings
    from mivhead.diagnostics.tsne import draw_tsne as draw_tsne
    from mivhead.diagnostics.tsne import miv_embeddings as miv_embeddings

__getattr__, __dir__ = lazy(
    __name__,
    {
        "attention": "BlockAttention draw_attention explain",
        "cross_validation": "CrossValidation cross_validate",
        "evaluation": "Evaluation evaluate",
        "explanation": "Explanation explain_images",
        "pictures": "draw_confusion",
        "suggestion": "Suggestion suggest",
        "tsne": "Embeddings centroid_embeddings draw_tsne miv_embeddings",
    },
)
