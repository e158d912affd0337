"""Self-mask and identity start: leave-own-out in plain loops, and where training begins."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from mivhead.features import Features
from mivhead.head.recipe import resolve_blocks
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.head import MIVHead
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.head.training import loss_and_gradients
from tests.bench.head.test_oracle import CNN, VIT, make_features, make_head
from tests.helpers import oracle

SHOTS = {"uneven": [0, 0, 0, 1, 2, 2], "even": [0, 0, 1, 1, 2, 2], "one each": [0, 1, 2]}
MASKED = {
    "mivhead": Ablation(),
    "joint": Ablation(objective="joint"),
    "dot product": Ablation.paper(self_mask=True, attention="dot"),
    "no cross-attention": Ablation.paper(self_mask=True, cross_attention=False),
    "blocks, nothing hidden": Ablation.paper(objective="blocks"),
}


def pseudo_queries(labels: list[int]) -> list[int]:
    """The shot of every pseudo-query: the shots themselves, then two views of some."""
    return [*range(len(labels)), len(labels) - 1, 0, 0]


@pytest.mark.parametrize("recipe", ["mivhead", "dot product", "no cross-attention"])
@pytest.mark.parametrize("shots", SHOTS)
def test_no_attention_to_the_own_image_where_there_are_others(shots: str, recipe: str) -> None:
    labels, sources = SHOTS[shots], pseudo_queries(SHOTS[shots])
    images = make_features(len(sources), "cnn", 0)
    head = make_head(images, CNN, MASKED[recipe])
    bags = Bags.from_labels(torch.tensor(labels), 3)
    cap = head.layers[0].cap
    with torch.no_grad():
        query = head.embed(head.prepare(images))[0]
        support = query.rows(slice(len(labels)))
        hidden = bags.hidden(torch.tensor(sources))
        plain, masked = (cap.attention(query, support, bags, each) for each in (None, hidden))
        masked = masked.expand(len(masked), 3, len(sources), -1)
        plain = plain.expand_as(masked)
    for q, source in enumerate(sources):
        for c in range(3):
            own = [i for i, label in enumerate(labels) if label == c]
            if source not in own or len(own) == 1:
                assert torch.equal(masked[:, c, q], plain[:, c, q])
                continue
            place = own.index(source)
            assert (masked[:, c, q, place] == 0).all()
            others = [s for s in range(len(own)) if s != place]
            rest = plain[:, c, q, others]  # what is left, scaled up to a sum of 1
            expected = rest / rest.sum(dim=1, keepdim=True)
            torch.testing.assert_close(masked[:, c, q, others], expected)


def plain_vector(head: MIVHead, images: Features, block: int, row: int) -> np.ndarray:
    layer, part = head.layers[block], images.blocks[block]
    pooling = {k: v.numpy() for k, v in layer.pooling.state_dict().items()}
    return oracle.image_vector(
        None if part.map is None else part.map[row],
        None if part.token is None else part.token[row],
        dataclasses.asdict(layer.config),
        pooling.get("theta"),
        pooling.get("mu"),
    )


def plain_loss(head: MIVHead, images: Features, labels: list[int], sources: list[int]) -> float:
    """Every query without its own image in the bag, unless nothing would be left of it."""
    recipe, total = head.recipe, 0.0
    for q, source in enumerate(sources):
        per_block = []
        for b, layer in enumerate(head.layers):
            params = {k: v.numpy() for k, v in layer.cap.state_dict().items()}
            query, prototypes = plain_vector(head, images, b, q), []
            for c in range(3):
                bag = [i for i, label in enumerate(labels) if label == c]
                if recipe.self_mask and len(bag) > 1:
                    bag = [i for i in bag if i != source]
                vectors = [plain_vector(head, images, b, i) for i in bag]
                prototype, own = oracle.cap(
                    query, vectors, params, layer.config.heads, **dataclasses.asdict(recipe)
                )
                prototypes.append(prototype)
            per_block.append(oracle.centred_cosine(own, prototypes))
        if recipe.objective == "joint":
            logits = [oracle.combine(per_block, recipe.temperature, recipe.temperature_order)]
        else:
            logits = [[c / recipe.temperature for c in cosines] for cosines in per_block]
        for each in logits:
            total -= math.log(oracle.softmax(each)[labels[source]])
    return total / len(sources)


@pytest.mark.parametrize("recipe", MASKED)
@pytest.mark.parametrize("shots", SHOTS)
@pytest.mark.parametrize(("kind", "presets"), [("cnn", CNN), ("vit", VIT)])
def test_the_loss_equals_plain_loops(kind: str, presets: tuple, shots: str, recipe: str) -> None:
    labels, sources = SHOTS[shots], pseudo_queries(SHOTS[shots])
    images = make_features(len(sources), kind, 0)
    head = make_head(images, presets, MASKED[recipe])
    found = loss_and_gradients(
        head,
        head.prepare(images),
        torch.tensor(labels)[sources],
        Bags.from_labels(torch.tensor(labels), 3),
        torch.tensor(sources) if MASKED[recipe].self_mask else None,
    )
    assert found == pytest.approx(plain_loss(head, images, labels, sources), abs=1e-5)


@pytest.mark.parametrize("recipe", ["mivhead", "joint", "no cross-attention"])
def test_masked_gradients_equal_finite_differences(recipe: str) -> None:
    labels, sources = SHOTS["uneven"], pseudo_queries(SHOTS["uneven"])
    images = make_features(len(sources), "vit", 0)
    head = make_head(images, VIT, MASKED[recipe])
    inputs = (
        head.prepare(images),
        torch.tensor(labels)[sources],
        Bags.from_labels(torch.tensor(labels), 3),
        torch.tensor(sources),
    )
    loss_and_gradients(head, *inputs)
    gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    assert any("key" in n for n in gradients) == head.recipe.cross_attention
    generator, step = torch.Generator().manual_seed(0), 1e-5
    for name, parameter in head.named_parameters():
        flat = parameter.detach().view(-1)
        index = int(torch.randint(len(flat), (), generator=generator))
        start, losses = flat[index].item(), []
        for moved in (start + step, start - step):
            flat[index] = moved
            losses.append(loss_and_gradients(head, *inputs))
        flat[index] = start
        found = gradients[name].view(-1)[index].item() if name in gradients else 0.0
        assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-6, rel=1e-4)


def test_the_identity_start_is_a_centred_nearest_centroid_of_normalised_vectors() -> None:
    labels = SHOTS["uneven"]
    support, queries = (Features(make_features(n, "cnn", n).blocks[1:]) for n in (6, 4))
    recipe = Ablation(eta=0.0)
    head = MIVHead(resolve_blocks(support), recipe, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        shots, asked = (head.embed(head.prepare(each)) for each in (support, queries))
        found = head(asked, shots, Bags.from_labels(torch.tensor(labels), 3))[0]

    def vector(features: Features, row: int) -> np.ndarray:
        return oracle.layer_norm(features.blocks[0].map[row].mean(axis=(1, 2)))

    centroids = []
    for c in range(3):
        own = [vector(support, i) for i, label in enumerate(labels) if label == c]
        centroids.append(sum(own) / len(own))
    for q in range(4):
        expected = oracle.centred_cosine(vector(queries, q), centroids)
        np.testing.assert_allclose(found[q], expected, atol=1e-6)


def test_the_identity_start_is_the_same_from_any_seed() -> None:
    blocks = resolve_blocks(make_features(2, "vit", 0), VIT)
    first, second = (
        MIVHead(blocks, Ablation(), torch.Generator().manual_seed(seed)).state_dict()
        for seed in (0, 1)
    )
    assert first.keys() == MIVHead(blocks, Ablation.paper(), None).state_dict().keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
    torch.testing.assert_close(first["blocks.0.cap.key.weight"], torch.eye(8))
    torch.testing.assert_close(first["blocks.1.cap.value.weight"], torch.eye(8))


def test_a_recipe_of_plain_means_hides_nothing() -> None:
    with pytest.raises(ValueError, match="self_mask=True needs prototype='cap'"):
        Ablation.paper(prototype="mean", self_mask=True)
