"""How good a fitted model is, and why it decides as it does.

- `evaluation`: accuracy on labelled images that the model has not seen.
- `cross_validation`: what to expect, from the shots alone, and shots that may be mislabelled.
- `explanation`: the reasons for a prediction, as an object; what the head attends to.
- `suggestion`: which images to label next.
- `pages`: pages of results and suggestions, each one self-contained HTML file.
- `pictures`: drawings of the confusion matrix and of reasons.
"""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy

if TYPE_CHECKING:
    from mivhead.diagnostics.cross_validation import CrossValidation as CrossValidation
    from mivhead.diagnostics.evaluation import Evaluation as Evaluation
    from mivhead.diagnostics.evaluation import evaluate as evaluate
    from mivhead.diagnostics.explanation import Explanation as Explanation
    from mivhead.diagnostics.explanation import explain_images as explain_images
    from mivhead.diagnostics.suggestion import Suggestion as Suggestion
    from mivhead.diagnostics.suggestion import suggest as suggest

__getattr__, __dir__ = lazy(
    __name__,
    {
        "cross_validation": "CrossValidation",
        "evaluation": "Evaluation evaluate",
        "explanation": "Explanation explain_images",
        "suggestion": "Suggestion suggest",
    },
)
