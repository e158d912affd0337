"""Plain experts beside the head: ridge regressions in closed form, and the weights of all voices.

The head's blocks learn where to look; an expert learns nothing but a linear map of a fixed
description of the image. Each is right on other images, so together they are better than either.
"""
