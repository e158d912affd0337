"""The reference runs of the authors' implementation in `tests/golden`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mivhead import BlockPreset, Features, Recipe

FOLDER = Path(__file__).parents[1] / "golden"


class GoldenRun:
    """One file: its tensors, as NumPy's (`"np"`) or PyTorch's (`"pt"`), and its configuration."""

    def __init__(self, name: str, framework: str) -> None:
        with safe_open(FOLDER / f"golden_{name}.safetensors", framework) as file:
            config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.presets = [
            BlockPreset(tuple(sizes), config["native_map"], name, config["tau"], heads)
            for sizes, heads in zip(config["pool_sizes"], config["heads"], strict=True)
        ]
        self.recipe = Recipe.paper(
            eta=config["eta"],
            temperature=config["temperature"],
            steps=config["steps"],
            learning_rate=config["lr"],
            pooling_learning_rate=config["pooling_lr"],
            momentum=config["momentum"],
        )

    def features(self, part: str) -> Features:
        """Return the features of the support, the views or the queries."""
        return Features.from_tensors(
            {
                key.removeprefix(f"{part}.").replace("cls", "token"): value
                for key, value in self.tensors.items()
                if key.startswith(f"{part}.block")
            }
        )

    def initial(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the block, the name and the value of each initial parameter of Component 2."""
        for key, value in self.tensors.items():
            if key.startswith("init.block"):
                number, name = key.removeprefix("init.block").split(".", 1)
                yield int(number), f"cap.{name}", value

    def final(self) -> dict[str, Any]:
        """Return the parameters after training, by our names."""
        found = {}
        for key, value in self.tensors.items():
            kind, _, rest = key.partition(".block")
            if kind == "final" and "attention" not in rest and "query_vectors" not in rest:
                number, name = rest.split(".", 1)
                room = "pooling" if name in ("theta", "mu") else "cap"
                found[f"blocks.{number}.{room}.{name}"] = value
        return found
